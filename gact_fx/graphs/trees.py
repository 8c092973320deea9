"""Nested lists, tuples and dicts of tensors.

Private, tried with torch 2.11 and 2.13: ``torch.utils._pytree``, until ``torch.utils.pytree`` is there everywhere.
"""

from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
