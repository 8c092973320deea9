"""The operators ``gact_fx::compress``, ``decompress``, ``behind`` and ``made``: schemas, fakes, implementations.

All are pure functions that consume no random numbers: the noise of stochastic rounding is a hash of the seed, the
element's index and its group's metadata. They have no autograd formula, since they are put into graphs that were
differentiated already. ``behind`` and ``made`` order what a compiler would reorder. PyTorch code
(`gact_fx.codec.reference`) serves the other two on every device; the library ``libgact_fx`` (csrc/) overrides it with
kernels where it has them. ``GACT_FX_NO_EXT=1`` in the environment leaves the library unloaded.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gact_fx.codec import reference
from gact_fx.codec.code import Code
from gact_fx.codec.layout import blob_nbytes, check_compress, check_decompress
from gact_fx.graphs.operators import has_kernel

# Elements are read and written in logical row-major order, whatever the strides: a layout that the compiler chose
# differently from what it traced can cost a copy, never correctness. Hence no fixed stride order.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_library = torch.library.Library("gact_fx", "DEF")
_library.define(
    'compress(Tensor x, int bits, int group_size, int seed, Tensor? mask=None, str rounding="stochastic", '
    'str by_place="") -> Tensor',
    tags=_TAGS,
)
_library.define(
    "decompress(Tensor blob, SymInt[] size, ScalarType dtype, int bits, int group_size, int seed=0, "
    'str rounding="stochastic", str by_place="") -> Tensor',
    tags=_TAGS,
)
_library.define("behind(Tensor blob, Tensor before) -> Tensor", tags=_TAGS)
_library.define("made(Tensor x, Tensor? before=None) -> Tensor", tags=_TAGS)


def behind(blob: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A copy of ``blob``, which no compiler can make until it has made ``before``."""
    return blob.clone()


def made(x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """One byte, which no compiler can make until ``x`` and ``before`` are in memory; their readers read them there."""
    return x.new_zeros(1, dtype=torch.uint8)


def _compress_fake(x: torch.Tensor, *args: Any) -> torch.Tensor:
    code = Code.of_compress((x, *args))
    mask = args[3] if len(args) > 3 else None
    check_compress(x, code.bits, code.group_size, mask, code.rounding, code.by_place)
    nbytes = blob_nbytes(
        x.numel(), x.dtype, code.bits, code.group_size, 0 if mask is None else mask.numel(), code.by_place
    )
    return x.new_empty(nbytes, dtype=torch.uint8)


def _decompress_fake(blob: torch.Tensor, size: Sequence[int], dtype: torch.dtype, *args: Any) -> torch.Tensor:
    code = Code.of_decompress((blob, size, dtype, *args))
    check_decompress(blob, size, dtype, code.bits, code.group_size, code.rounding, code.by_place)
    return blob.new_empty(size, dtype=dtype)


for _implementation, _fake in ((reference.compress, _compress_fake), (reference.decompress, _decompress_fake)):
    _library.impl(_implementation.__name__, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gact_fx::{_implementation.__name__}", _fake, lib=_library)


_library.impl("behind", behind, "CompositeExplicitAutograd")
torch.library.register_fake("gact_fx::behind", lambda blob, before: torch.empty_like(blob), lib=_library)
_library.impl("made", made, "CompositeExplicitAutograd")
torch.library.register_fake("gact_fx::made", made, lib=_library)

LIBRARY = Path(__file__).parents[1] / f"libgact_fx.{'pyd' if sys.platform == 'win32' else 'so'}"


def _load_library() -> str:
    """Load the kernels; return '' or why there are none."""
    if os.environ.get("GACT_FX_NO_EXT") == "1":
        return "GACT_FX_NO_EXT=1 leaves them unloaded"
    if not LIBRARY.exists():
        return f"gact_fx was installed without {LIBRARY.name}"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        reason = f"{LIBRARY} does not load beside torch {torch.__version__}: {error.__cause__ or error}"
        warnings.warn(
            f"gact_fx: PyTorch code serves in place of the kernels, many times slower; build gact_fx here, or install "
            f"a wheel for this machine: {reason}",
            stacklevel=2,
        )
        return reason
    return ""


WHY_NOT_LOADED = _load_library()


def cpu_capability() -> str:
    """Return the instruction set of the CPU kernels, "avx512", "avx2" or "baseline"; "" where they are not loaded."""
    return "" if WHY_NOT_LOADED else str(torch.ops.gact_fx.cpu_capability())


def has_compiled_kernels(device_type: str) -> bool:
    """Return whether both operators have compiled kernels for a device type such as ``"cpu"`` or ``"cuda"``.

    Without them the PyTorch implementation serves: same results bit by bit, many times slower.
    """
    return all(has_kernel(f"gact_fx::{op}", device_type) for op in ("compress", "decompress"))


def compress(
    x: torch.Tensor,
    bits: int,
    group_size: int = 256,
    seed: int = 0,
    mask: torch.Tensor | None = None,
    rounding: str = "stochastic",
    by_place: str = "",
) -> torch.Tensor:
    """Quantize a tensor to a few bits per element, within groups of neighbours, into one blob of bytes.

    The expectation of what `decompress` returns is ``x``, over seeds, unless rounding is to nearest. Groups are taken
    in row-major order. A group that is constant comes back exactly (-0.0 as +0.0), and with stochastic rounding so
    does the minimum of any group of normal numbers. NaN and infinities come back where they went in, except that one
    bit per element has no room for two kinds of them in a group, which then all come back as NaN.

    Biased are: finite values where the kinds leave a single finite level (they come back as their group's minimum);
    values that would decode beyond the dtype's largest, and are clamped to it; and what is decoded into 16 bits, by up
    to half a unit in its last place (at 8 bits of bfloat16 an element's bias is 0.15 of its noise, in the mean; below
    7 bits it drowns). Positions between codes are resolved to 2^-22 steps. A rotated group whose largest element has
    much of its norm is biased by up to 4 % of that element at 1 bit, and by less at more.

    Args:
        x: float32, bfloat16, float16 or float64 of any shape and strides; or a mask (bool, or uint8 at one bit, whose
            nonzero elements are true) or integers in [0, 2^bits), which are packed exactly.
        bits: width of a code, 1 to 8. For float32 also 16: bfloat16, rounded without bias, non-finite values kept.
            For a mask 1, for integers 1 to 16.
        group_size: elements that share a minimum and a step, a power of two from 32 to 1024; ignored for integers.
        seed: 64 bits that the noise depends on; ignored for integers.
        mask: bool or uint8 of any shape on the same device, packed behind the codes at one bit per element.
        rounding: ``"stochastic"``, of variance step^2 p (1 - p) for a value that lies p steps above a code;
            ``"dither"``, subtractive dither, of variance step^2 / 12 for every value but those of constant groups, not
            for 16 bits; ``"rotated"``, of 0.57, 0.13, 0.036 and 0.0096 of the group's variance at 1 to 4 bits, for
            codes of the nearest centroids of what a random rotation makes of the group, and dither at 5 to 8 bits; or
            ``"nearest"``, biased, for debugging. Ignored for integers.
        by_place: widths of the groups of a row in place of ``bits``, such as "8 2x15" for rows of 16 groups, of which
            the first has 8 bits; ``x`` has a whole number of rows. '' for one width.

    Returns:
        1-D uint8 tensor of `gact_fx.codec.layout.blob_nbytes` elements.

    Raises:
        ValueError: ``bits``, ``group_size``, ``rounding`` or a dtype is not one of the above, the devices differ, or
            (on the CPU; elsewhere a device-side assertion) integers lie outside their range.

    Sources: ActNN (Chen et al., ICML 2021) and GACT (Liu et al., ICML 2022) for per-group stochastic quantization;
    subtractive dither: Schuchman, "Dither Signals and Their Effect on Quantization Noise" (1964); rotated groups:
    Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation" (ICML 2022).
    """
    blob: torch.Tensor = torch.ops.gact_fx.compress.default(x, bits, group_size, seed, mask, rounding, by_place)
    return blob


def decompress(
    blob: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int = 256,
    seed: int = 0,
    rounding: str = "stochastic",
    by_place: str = "",
) -> torch.Tensor:
    """Return the tensor that a blob of `compress` stands for, or the mask at its end.

    Args:
        blob: 1-D uint8, from `compress`.
        size: shape of the tensor that was compressed; any shape with as many elements will do.
        dtype: dtype of the tensor that was compressed; bool, or uint8 with ``bits`` 1, reads the mask at the end of
            the blob, as true or false, ones or zeros.
        bits: as for `compress`; ignored for bool.
        group_size: as for `compress`.
        seed: as for `compress`; only dither and rotated groups read it.
        rounding: as for `compress`.
        by_place: as for `compress`.

    Returns:
        A new contiguous tensor of the given size and dtype.

    Raises:
        ValueError: an argument is not one of the above, or the blob is too short for the size.
    """
    result: torch.Tensor = torch.ops.gact_fx.decompress.default(
        blob, size, dtype, bits, group_size, seed, rounding, by_place
    )
    return result
