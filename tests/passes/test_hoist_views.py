"""Codes are made while forward runs, also of what backward reads through a transpose."""

import torch
from conftest import Trace, analyze, insert, run_pass
from torch import nn

from gact_fx.codec.code import Code
from gact_fx.graphs.live_memory import peak_nbytes
from gact_fx.plan import GraphPlan, TensorPlan

X = torch.randn(64, 64)
WEIGHTS = [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(8)]


def function(x: torch.Tensor) -> torch.Tensor:
    """Backward reads transposes of what the products are given."""
    for left, right in zip(WEIGHTS[::2], WEIGHTS[1::2], strict=True):
        x = torch.bmm((x @ left)[None], (x @ right)[None])[0]
    return x.sum()


def rewritten(trace: Trace, hoists: bool) -> tuple[torch.fx.Graph, int]:
    pair = trace(function, X)
    if hoists:
        run_pass("hoist_views", pair)
    analysis = analyze(pair)
    entries = tuple(TensorPlan(tensor.key, Code(8)) for tensor, _ in analysis.quantized())
    insert(pair, analysis, GraphPlan("", entries))
    return pair.forward.graph, len(entries)


def test_codes_are_made_before_forward_ends(trace: Trace) -> None:
    graph, count = rewritten(trace, hoists=True)
    late, _ = rewritten(trace, hoists=False)
    assert count >= 8
    assert peak_nbytes(graph, [], fused=False) < peak_nbytes(late, [], fused=False)
    names = [str(node.target) for node in graph.nodes]
    last_product = max(i for i, name in enumerate(names) if "bmm" in name)
    # All but those of what the last product reads.
    assert names[last_product:].count("gact_fx.compress.default") <= 4


def test_views_of_what_the_caller_gave_stay(trace: Trace) -> None:
    pair = trace(lambda x: (x @ WEIGHTS[0]).sum(), X.clone().requires_grad_())
    before = [node.name for node in pair.forward.graph.nodes]
    run_pass("hoist_views", pair)
    assert [node.name for node in pair.forward.graph.nodes] == before
