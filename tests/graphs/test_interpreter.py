"""Graphs run operator by operator mean what Inductor, or PyTorch's own fused operators, make of them."""

from operator import getitem
from typing import Any

import pytest
import torch
from conftest import Trace
from peak_bytes import peak_bytes
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gact_fx.graphs.compilers import boxed, without_views
from gact_fx.graphs.interpreter import GraphInterpreter

aten = torch.ops.aten


def test_dropout_is_drawn_again_in_backward(trace: Trace) -> None:
    """Positively homogeneous of degree 1 in w: <df/dw, w> = f if both drew the same mask."""
    v, w = nn.Parameter(torch.rand(16, 64)), nn.Parameter(torch.rand(64, 8))
    function = lambda x: (F.dropout(x @ v, 0.5) @ w).sum()  # noqa: E731
    x = torch.rand(64, 16)
    pair = trace(function, x, inner="inductor", recompute="auto")
    for graph in (pair.forward, pair.backward):
        assert any("inductor_random" in str(node.target) for node in graph.graph.nodes)
    tensors = {tuple(t.shape): t.detach() for t in (x, v, w)}
    inputs = [tensors[tuple(slot.meta["val"].shape)] for slot in pair.forward.graph.find_nodes(op="placeholder")]
    losses = []
    for _ in range(3):
        loss, *saved = GraphInterpreter(pair.forward).run(*inputs)
        found = GraphInterpreter(pair.backward).run(*saved, torch.ones_like(loss))
        gradients = {tuple(g.shape): g for g in found if g is not None}
        for parameter in (v, w):
            shape = tuple(parameter.shape)
            assert float((gradients[shape] * parameter).sum().detach()) == pytest.approx(float(loss), rel=1e-4)
        losses.append(float(loss))
    assert len(set(losses)) == 3  # every step draws anew


@pytest.mark.parametrize("mode", ["rand", "randn"])
def test_random_numbers_are_those_of_their_seed(mode: str) -> None:
    import torch._inductor.inductor_prims as prims

    graph = fx.Graph()
    seed = graph.placeholder("seed")
    graph.output(graph.call_function(prims.random, ([4096], seed, mode)))
    run = GraphInterpreter(fx.GraphModule({}, graph)).run
    first, again, other = (run(torch.tensor(s)) for s in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    mean, deviation = (0.5, 12**-0.5) if mode == "rand" else (0.0, 1.0)
    assert float(first.mean()) == pytest.approx(mean, abs=4 * deviation / 64)
    assert float(first.std()) == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "scale", "long keys", "broadcast mask", "shared keys"])
def test_spelled_out_attention_is_the_fused_one(case: str) -> None:
    heads = 6 if case == "shared keys" else 3
    query = torch.randn(2, heads, 40, 16)
    key, value = torch.randn(2, 2, 3, 56 if case == "long keys" else 40, 16)
    options: dict[str, Any] = {}
    if case == "mask":
        options["attn_mask"] = torch.randn(2, 3, 40, 40)
    elif case == "broadcast mask":
        options["attn_mask"] = torch.randn(2, 1, 1, 40)
    elif case == "scale":
        options["scale"] = 0.7
    flags = (0.0, case == "causal")
    grad = torch.randn(2, heads, 40, 16)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *flags, **options)
        slopes = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, output, logsumexp, *flags, **options
        )
        return output, logsumexp, *slopes

    arguments = (query, key, value, grad)
    wanted = fused(*arguments)
    graph = fx.Graph()
    q, k, v, g = (graph.placeholder(name) for name in "qkvg")
    ahead = graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, *flags), options)
    parts = [graph.call_function(getitem, (ahead, i)) for i in range(2)]
    behind = graph.call_function(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (g, q, k, v, *parts, *flags), options
    )
    graph.output([*parts, *(graph.call_function(getitem, (behind, i)) for i in range(3))])
    found = GraphInterpreter(fx.GraphModule({}, graph), differentiable=True).run(*arguments)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_view_takes_whatever_strides() -> None:
    """Inductor lays tensors out as it likes: what was a view in the traced graph may need a copy."""
    module = make_fx(lambda x: x.view(24))(torch.randn(4, 6))
    x = torch.randn(6, 4).t()
    with pytest.raises(RuntimeError, match="view"):
        module(x)
    assert torch.equal(GraphInterpreter(module).run(x), x.reshape(24))


def test_casts_carry_derivatives() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.prims.convert_element_type.default, (x, torch.bfloat16)))
    module = fx.GraphModule({}, graph)
    value = torch.randn(8, requires_grad=True)
    GraphInterpreter(module, differentiable=True).run(value).float().square().sum().backward()
    torch.testing.assert_close(value.grad, 2 * value.detach(), rtol=0.02, atol=0)


def test_results_are_no_views_as_those_of_compiled_code_are_none() -> None:
    """Autograd lets nobody write in place to a view among several results of a graph."""
    shared, alone = torch.randn(4, 3), torch.randn(6)
    run = without_views(boxed(lambda arguments: [shared.t(), alone.view(2, 3), 7, shared]), 3)
    turned, viewed, number, saved = run([])
    assert not turned._is_view() and not viewed._is_view() and number == 7 and saved is shared
    assert torch.equal(turned, shared.t()) and torch.equal(viewed, alone.view(2, 3))
    assert turned.untyped_storage()._cdata != shared.untyped_storage()._cdata
    assert viewed.untyped_storage()._cdata == alone.untyped_storage()._cdata
    # By which results are told when another graph gets them.
    assert turned._version == viewed._version == 0


def test_a_product_with_a_summand_makes_one_tensor() -> None:
    import torch._inductor.inductor_prims

    a, b, c = torch.randn(512, 1024), torch.randn(512, 1), torch.randn(512, 1024)
    graph = make_fx(torch.ops.prims.fma.default)(a, b, c)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        found = GraphInterpreter(graph).run(a, b, c)
    torch.testing.assert_close(found, a * b + c)
    sizes = [e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(size for size in sizes if size >= c.nbytes) == c.nbytes


@pytest.mark.parametrize("shape", [(5, 3, 12, 12), (3, 12, 12), (1, 16, 12, 12)])
def test_indices_of_pooling_are_computed_block_by_block(shape: tuple[int, ...]) -> None:
    import torch._inductor.inductor_prims

    offsets = torch.randint(0, 9, shape, dtype=torch.int8)
    indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default
    options = [3, 3], [24, 24], [2, 2], [1, 1], [1, 1]
    graph = fx.Graph()
    graph.output(graph.call_function(indices, (graph.placeholder("offsets"), *options)))
    found = GraphInterpreter(fx.GraphModule({}, graph)).run(offsets)
    assert torch.equal(found, indices(offsets, *options))
    large = offsets.repeat(
        *[16 if at == len(shape) - 3 else 4 if at > len(shape) - 3 else 1 for at in range(len(shape))]
    )
    peak = peak_bytes(lambda: torch.ones((), requires_grad=True) + _run_for(graph, large)).forward
    assert peak < 2.5 * 8 * large.numel()


def _run_for(graph: fx.Graph, x: torch.Tensor) -> torch.Tensor:
    GraphInterpreter(fx.GraphModule({}, graph)).run(x)
    return torch.zeros(())
