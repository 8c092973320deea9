"""Narrower codes for a step of which a few rows alone are measured.

The rows run apart, on codes of the width for profiling. The step itself, which trains the model, holds the whole batch
for backward, and would decide the largest batch if its codes were as wide. With these it holds what steps by the plan
do, and its gradient has for once the noise of codes that are all of one width.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gact_fx.codec.code import WIDTHS, Code
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.compilers import Compiled, interpret_graph, without_views
from gact_fx.graphs.edit import copy_module
from gact_fx.passes.graph_analysis import GraphAnalysis

compress = torch.ops.gact_fx.compress.default
decompress = torch.ops.gact_fx.decompress.default
# Where backward bends, errors of narrow codes are out of proportion.
LEAST_WHERE_BENT = 6


def narrowed(pair: GraphPair, analysis: GraphAnalysis, bits: int) -> tuple[Compiled, Compiled]:
    """Forward of the pair, writing codes of ``bits`` where it can, and backward, reading these or the pair's own."""
    copied = replace(pair, forward=copy_module(pair.forward), backward=copy_module(pair.backward))
    for value, width in _widths(copied, analysis, bits):
        value.source.target = partial(_compress, width)
        for reader in value.placeholder.users:
            if reader.target is decompress:
                reader.target = partial(_decompress, width)
    forward = without_views(interpret_graph(copied.forward), pair.num_user_outputs)
    return forward, interpret_graph(copied.backward)


def _widths(pair: GraphPair, analysis: GraphAnalysis, bits: int) -> list[tuple[SavedValue, int]]:
    """The saved codes that are to be narrower than they are, with their widths."""
    least = {how.name: max(bits, how.min_bits, LEAST_WHERE_BENT * how.bends) for _, how in analysis.quantized()}
    codes = [value for value in pair.saved_values() if value.name in least and value.source.target is compress]
    return [(v, least[v.name]) for v in codes if least[v.name] < Code.of_compress(v.source.args).bits <= WIDTHS[-1]]


def _compress(width: int, x: Tensor, bits: int, *rest: Any) -> Tensor:
    """A blob of ``width`` bits, one byte longer than it need be: all others have an even number of bytes."""
    blob = compress(x, width, *rest)
    return torch.cat([blob, blob.new_zeros(1)])


def _decompress(width: int, blob: Tensor, size: Sequence[int], dtype: torch.dtype, bits: int, *rest: Any) -> Tensor:
    if blob.numel() % 2:
        # A mask behind the codes has one bit an element whatever they have.
        blob, bits = blob[:-1], width if dtype.is_floating_point else bits
    found: Tensor = decompress(blob, size, dtype, bits, *rest)
    return found
