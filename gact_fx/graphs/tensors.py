"""What tells one tensor's memory from another's.

Private, tried with torch 2.11 and 2.13: ``UntypedStorage._cdata`` (a storage's address as an object; public would be
a ``storage.id()``), ``Tensor._version`` (what autograd's own check of writes in place reads; it is documented only in
notes), ``Tensor._is_view`` (public would be ``Tensor.is_view``), ``torch._subclasses.fake_tensor.FakeTensor`` (public
would be a question to ``torch.compiler``), ``is_traceable_wrapper_subclass`` of
``torch.utils._python_dispatch`` (public would be the same without the underscore) and
``torch.multiprocessing.reductions.StorageWeakRef`` (public would be weak references to storages that outlive their
Python objects).
"""

from typing import TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Address, dtype, shape, strides, whether signs are turned (the imaginary part of a conjugate), and version: an operator
# in place changes the last of these alone. Of what lies in memory row by row, every view that does has the same codes,
# and so the same identity.
Identity = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]


def identity(x: torch.Tensor) -> Identity:
    """What tells ``x`` from other tensors while its memory is held, but for writes that autograd does not see either
    (``x.data``, NumPy)."""
    shape, stride = ((x.numel(),), (1,)) if x.is_contiguous() else (tuple(x.shape), x.stride())
    return x.data_ptr(), x.dtype, shape, stride, x.is_neg(), x._version


def storage_key(x: torch.Tensor) -> int:
    """The same for all tensors, fake ones too, that share a storage while it lives."""
    key: int = x.untyped_storage()._cdata
    return key


def version(x: torch.Tensor) -> int:
    """How often ``x`` was written to in place, as autograd counts."""
    return x._version


def is_view(x: torch.Tensor) -> bool:
    """Whether ``x`` came as a view of another tensor, as autograd counts."""
    return x._is_view()


def is_plain(x: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor, of no class of its own, with strides; a fake one counts, a parameter does not."""
    is_one = type(x) is torch.Tensor or (is_fake(x) and not isinstance(x, torch.nn.Parameter))
    return is_one and isinstance(x, torch.Tensor) and x.layout is torch.strided


def is_fake(x: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor without data."""
    return type(x) is FakeTensor


def address(x: torch.Tensor) -> int | tuple[int, int]:
    """Where the memory of ``x`` begins, which tells it from others that live; fake tensors have none, but a place in
    their storage."""
    return (storage_key(x), int(x.storage_offset())) if is_fake(x) else x.data_ptr()


def is_subclass(x: torch.Tensor) -> bool:
    """Whether ``x`` is a tensor of a class of its own (a DTensor), or one that a transform wraps; fake ones are not."""
    return is_traceable_wrapper_subclass(x)


def is_foreign(x: object) -> bool:
    """Whether NumPy or another process may write to the memory of ``x``, a tensor, without PyTorch's knowledge."""
    is_own = not is_plain(x) or is_fake(x) or x.device.type != "cpu"
    return not is_own and isinstance(x, torch.Tensor) and (not x.untyped_storage().resizable() or x.is_shared())
