"""PyTorch's private side and the tools for FX graphs: the only room that uses PyTorch's private API.

Every module names in its docstring what it uses of that, the versions of torch that it was tried with, and what
public API would replace it. ``tests/test_rooms.py`` holds the rooms to it.
"""
