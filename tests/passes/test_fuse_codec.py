"""Spelled out or not, the graphs compute the same."""

import sys
from typing import Any

import pytest
import torch
from conftest import Mixed, Trace, analyze, gradients, insert, mixed_batch, run_pass
from torch import fx, nn

import gact_fx
from gact_fx import ops
from gact_fx.codec import reference
from gact_fx.codec.code import Code
from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.plan import GraphPlan, TensorPlan

compress = torch.ops.gact_fx.compress.default
decompress = torch.ops.gact_fx.decompress.default


def codec_nodes(*modules: fx.GraphModule) -> list[fx.Node]:
    return [node for module in modules for node in module.graph.nodes if node.target in (compress, decompress)]


@pytest.mark.parametrize(
    "rounding",
    ["stochastic", pytest.param("dither", marks=pytest.mark.slow), pytest.param("nearest", marks=pytest.mark.slow)],
)
def test_bits_of_the_graphs(trace: Trace, rounding: str) -> None:
    model, (x, y) = Mixed(), mixed_batch()
    results: list[list[Any]] = []
    for fuse in (False, True):
        pair = trace(model, x, y)
        analysis = analyze(pair)
        plans = (TensorPlan(t.key, Code(3, rounding, 64, i)) for i, (t, _) in enumerate(analysis.quantized()))
        insert(pair, analysis, GraphPlan("", tuple(plans)))
        operators = codec_nodes(pair.forward, pair.backward)
        if fuse:
            run_pass("fuse_codec", pair, fuse="auto")
            assert len(codec_nodes(pair.forward, pair.backward)) == (
                len(operators) if has_compiled_kernels("cpu") else 0
            )
            run_pass("fuse_codec", pair, fuse="on")
            assert operators
            assert not codec_nodes(pair.forward, pair.backward)
        generator = torch.Generator().manual_seed(3)
        inputs = [
            torch.randn(node.meta["val"].shape, generator=generator)
            if node.meta["val"].dtype.is_floating_point
            else torch.randint(0, 10, node.meta["val"].shape, generator=generator)
            for node in pair.forward.graph.find_nodes(op="placeholder")
        ]
        outputs = fx.Interpreter(pair.forward).run(*inputs)
        saved = outputs[pair.num_user_outputs :]
        found = fx.Interpreter(pair.backward).run(*saved, torch.ones_like(outputs[pair.num_user_outputs - 1]))
        results.append([*saved, *found])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Small(nn.Module):
    """A pointwise producer, a ReLU mask, a reader of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).relu()).square().mean()


# Inductor takes two minutes to spell codes out.
@pytest.mark.slow
@pytest.mark.skipif(not ops.has_compiled_kernels("cpu"), reason="libgact_fx is not built")
def test_inductor_gives_the_same_gradients() -> None:
    results = []
    for fuse in ("on", "auto"):  # which keeps the operators that are compiled
        torch.manual_seed(0)
        model = gact_fx.compile(Small(), fuse=fuse, min_elements=64, sample_batches=[(torch.randn(40, 32),)])
        model(torch.randn(40, 32)).backward()
        report = gact_fx.inspect(model)
        assert report.ratio > 2
        (graph,) = report.graphs
        assert bool(codec_nodes(graph.forward, graph.backward)) == (fuse == "auto")
        results.append(gradients(model))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_empty_tensors(dtype: torch.dtype) -> None:
    x = torch.empty(0, 3, dtype=dtype)
    blob = reference.compress_whole(x, 1, 256, 0)
    assert blob.numel() == 0
    assert reference.decompress_whole(blob, (0, 3), dtype, 1, 256).shape == (0, 3)


@pytest.mark.slow
def test_dynamic_shapes() -> None:
    torch.manual_seed(0)
    model, plain = Small(), Small()
    plain.load_state_dict(model.state_dict())
    batches = [torch.randn(n, 32) for n in (40, 64, 57)]
    gact_fx.compile(model, fuse="on", budget_bits=8, min_elements=64, sample_batches=[(batches[0],)])
    for batch in batches:
        for network in (model, plain):
            network.zero_grad()
            network(batch).backward()
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.slow
def test_devices_without_compiled_operators_are_fused_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's attribute of the pass's name is the function.
    for module in ("gact_fx.passes.fuse_codec", "gact_fx.diagnostics.collect"):
        monkeypatch.setattr(sys.modules[module], "has_compiled_kernels", lambda device: False)
    model = gact_fx.compile(Small(), min_elements=64, sample_batches=[(torch.randn(40, 32),)])
    model(torch.randn(40, 32)).backward()
    report = gact_fx.inspect(model)
    assert "no compiled operators for cpu: PyTorch code serves, fused by Inductor" in report.note
    assert report.note in str(report)
    assert not codec_nodes(report.graphs[0].forward, report.graphs[0].backward)
