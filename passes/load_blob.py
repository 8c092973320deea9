"""Decompress a blob where backward's graph inserts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gact_fx.codec import operators  # noqa: F401  (registers torch.ops.gact_fx)
from gact_fx.codec.code import Code
from gact_fx.graphs.aot import SavedValue
from gact_fx.graphs.edit import add_call, restored
from gact_fx.graphs.sizes import SizeBuilder

decompress = torch.ops.gact_fx.decompress.default
convert = torch.ops.prims.convert_element_type.default


def load_blob(
    sizes: SizeBuilder, value: SavedValue, shape: Sequence[Any], dtype: torch.dtype, code: Code, order: Sequence[int]
) -> tuple[fx.Node, fx.Node]:
    """What the blob in the slot of ``value`` stands for: in memory order, and in the order of its dimensions.

    ``shape`` is in the order of the dimensions, which ``order`` lists from the slowest to the fastest in memory.
    """
    graph = value.placeholder.graph
    stored = torch.uint8 if dtype is torch.bool else dtype
    arguments = (value.placeholder, sizes.build([shape[d] for d in order]), stored, *code.to_decompress())
    dense = add_call(graph, decompress, arguments, f"{value.name}_{'mask' if dtype is torch.bool else 'values'}")
    if dtype is torch.bool:
        number = add_call(graph, convert, (dense, torch.float32), f"{value.name}_number")
        dense = add_call(graph, torch.ops.aten.gt.Scalar, (number, 0.5), f"{value.name}_truth")
    return dense, restored(graph, dense, order)


def replace_reads(old: fx.Node, new: fx.Node, readers: set[fx.Node]) -> None:
    """Let those who read ``old`` read ``new``, but for ``readers`` and what decompresses blobs."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in readers and user.target is not decompress)
