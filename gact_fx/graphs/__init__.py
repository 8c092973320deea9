"""PyTorch's private side and the tools for FX graphs: the only room that uses what PyTorch does not document."""
