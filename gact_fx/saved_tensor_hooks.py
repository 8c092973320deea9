"""What PyTorch says of the saved-tensor hooks that are active. Private, tried with torch 2.11 and 2.13:
``torch._C._autograd._top_saved_tensors_default_hooks``, and ``_saved_tensors_hooks_get_disabled_error_message``, which
PyTorch's own ``disable_saved_tensors_hooks`` asks.
"""

from __future__ import annotations

from typing import Any

import torch


def top_hooks() -> Any:
    """The innermost saved-tensor hooks, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooks_are_forbidden() -> bool:
    """Whether hooks cannot be set, as within ``torch.func.grad``."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
