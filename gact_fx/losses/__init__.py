"""Losses that are computed in pieces, because what they are computed from is larger than all else."""
