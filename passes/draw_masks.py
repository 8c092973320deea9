"""Have the library draw what dropout keeps, where Inductor would draw it one number after another.

The masks are bit for bit those that Inductor draws. They are drawn again wherever they were.
"""

from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.draw_mask import draw_mask  # noqa: F401  (registers the operator)
from gact_fx.graphs.edit import add_call, numel
from gact_fx.graphs.operators import has_kernel
from gact_fx.passes.pipeline import Context

aten, prims = torch.ops.aten, torch.ops.prims
_DRAW = torch.ops.gact_fx.draw_mask.default
# Fewer numbers are as soon drawn as a kernel is called.
_MIN_NUMEL = 2**12
# What Inductor rounds to the dtype of the numbers that it compares, which themselves it leaves as they are.
_ROUNDS_THRESHOLDS = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def draw_masks(pair: GraphPair, context: Context) -> None:
    """Edit both graphs in place, on the CPU alone: a GPU draws numbers faster than it reads them.

    Graphs for other compilers than Inductor have none of its numbers.
    """
    if not has_kernel("gact_fx::draw_mask", "cpu"):
        return
    for module in (pair.forward, pair.backward):
        for numbers in module.graph.find_nodes(op="call_function", target=prims.inductor_random.default):
            size, seed, kind = numbers.args
            is_plain = kind == "rand" and not numbers.kwargs and numbers.meta["val"].device.type == "cpu"
            if is_plain and numel(numbers) >= _MIN_NUMEL:
                _draw(module.graph, numbers, seed, size)


def _draw(graph: fx.Graph, numbers: fx.Node, seed: Any, size: Any) -> None:
    """Draw every comparison of ``numbers``, or of what they are in another dtype, with a threshold."""
    casts = [user for user in numbers.users if user.target is prims.convert_element_type.default]
    for node in (numbers, *casts):
        dtype = node.meta["val"].dtype if _ROUNDS_THRESHOLDS else torch.float32
        for user in list(node.users):
            if user.target is aten.gt.Scalar and isinstance(user.args[1], int | float):
                threshold = float(torch.tensor(user.args[1], dtype=dtype))
                with graph.inserting_before(user):
                    mask = add_call(graph, _DRAW, (seed, size, threshold), f"{user.name}_drawn")
                user.replace_all_uses_with(mask)
                graph.erase_node(user)
