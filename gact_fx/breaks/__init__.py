"""What eager PyTorch saves for backward between compiled graphs, and what it does to gradients there."""
