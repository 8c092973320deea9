"""Narrower codes for a step of which a few rows alone are measured.

The rows run apart, with codes of the width for profiling. The step itself, which trains the model, holds the whole
batch for backward, and would decide the largest batch if its codes were as wide. With narrower ones it holds about as
much as steps by the plan do. In return this one gradient has the noise of codes that all have one width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from gact_fx.codec.code import WIDTHS, Code
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.compilers import Compiled, interpret_in_blocks, without_views
from gact_fx.graphs.edit import add_call, copy_module
from gact_fx.graphs.operators import MAKES_MEMORY
from gact_fx.passes.add_in_place import add_rows_in_place
from gact_fx.passes.backward_peak import blob_of
from gact_fx.passes.cast_late import cast_gradients_late
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.load_blob import convert
from gact_fx.passes.lower_peak import lower

compress = torch.ops.gact_fx.compress.default
decompress = torch.ops.gact_fx.decompress.default
# The least width of tensors in which backward is not linear: there narrow codes bias the gradient.
LEAST_WHERE_BENT = 6
# Rounds in a row that may find no lower peak of backward: each takes as long as the pass takes for a planned graph.
PATIENCE = 6


def narrowed(pair: GraphPair, analysis: GraphAnalysis, bits: int) -> tuple[Compiled, Compiled]:
    """Forward of the pair, writing codes of ``bits`` where it can, and backward, reading these or the pair's own."""
    copied = replace(pair, forward=copy_module(pair.forward), backward=copy_module(pair.backward))
    cast_gradients_late(copied.backward.graph)
    # What runs block by block has about as little in memory as loops have.
    lower(copied, fused=True, patience=PATIENCE)
    view_masks(copied.backward.graph)
    widths = {}
    for value, width in _widths(copied, analysis, bits):
        value.source.target = _compress(width)
        widths[value.placeholder] = width
    for node in copied.backward.graph.find_nodes(op="call_function", target=decompress):
        if (blob := blob_of(node)) in widths:
            node.target = _decompress(widths[blob])
    add_rows_in_place(copied.backward.graph)
    forward = without_views(interpret_in_blocks(copied.forward), pair.num_user_outputs)
    return forward, interpret_in_blocks(copied.backward)


def view_masks(graph: fx.Graph) -> None:
    """Read masks, which are decoded to bytes of 0 and 1, as they are: for loops these are compared with a half."""
    for truth in graph.find_nodes(op="call_function", target=torch.ops.aten.gt.Scalar):
        number = truth.args[0]
        dense = number.args[0] if number.target is convert else None
        if not isinstance(dense, fx.Node) or dense.target is not decompress or truth.args[1] != 0.5:
            continue
        _, _, dtype, bits, *_ = dense.args
        if dtype is torch.uint8 and bits == 1:
            with graph.inserting_before(truth):
                seen = add_call(graph, torch.ops.aten.view.dtype, (dense, torch.bool), f"{truth.name}_seen")
            truth.replace_all_uses_with(seen)
            graph.erase_node(truth)
            if not number.users:
                graph.erase_node(number)


def _widths(pair: GraphPair, analysis: GraphAnalysis, bits: int) -> list[tuple[SavedValue, int]]:
    """The saved codes that are to be narrower than they are, with their widths."""
    least = {
        how.name: max(bits, how.min_bits, LEAST_WHERE_BENT * (how.bends or how.is_curved))
        for _, how in analysis.quantized()
    }
    codes = [value for value in pair.saved_values() if value.name in least and value.source.target is compress]
    return [(v, least[v.name]) for v in codes if least[v.name] < Code.of_compress(v.source.args).bits <= WIDTHS[-1]]


def _compress(width: int) -> Callable[..., Tensor]:
    """Writes blobs of ``width`` bits, one byte longer than they need be: all others have an even number of bytes."""

    def narrow_compress(x: Tensor, bits: int, *rest: Any) -> Tensor:
        blob = compress(x, width, *rest)
        return torch.cat([blob, blob.new_zeros(1)])

    setattr(narrow_compress, MAKES_MEMORY, True)
    return narrow_compress


def _decompress(width: int) -> Callable[..., Tensor]:
    """Reads these blobs, and others."""

    def narrow_decompress(blob: Tensor, size: Sequence[int], dtype: torch.dtype, bits: int, *rest: Any) -> Tensor:
        if blob.numel() % 2:
            # A mask behind the codes has one bit an element whatever they have.
            blob, bits = blob[:-1], width if dtype.is_floating_point else bits
        found: Tensor = decompress(blob, size, dtype, bits, *rest)
        return found

    setattr(narrow_decompress, MAKES_MEMORY, True)
    return narrow_decompress
