"""Under autocast gradients are 16 bits wide until backward ends, and the same as before."""

import sys

import pytest
import torch
from conftest import gradients
from peak_bytes import peak_bytes
from torch import nn

import gact_fx
from gact_fx.passes.cast_late import _widens, cast_gradients_late


def graph_of(kind: str) -> torch.fx.Graph:
    """Backward with a cast of a product, or of something else, before its last product."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        narrow, wide = torch.empty(8, 8, dtype=torch.bfloat16), torch.empty(8, 8)

    def add(target: object, args: tuple[object, ...], value: torch.Tensor) -> torch.fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = value
        return node

    x = graph.placeholder("x")
    x.meta["val"] = narrow
    with mode:
        product = add(torch.ops.aten.mm.default, (x, x), torch.empty_like(narrow))
        rows = add(torch.ops.aten.mm.default, (x, x), torch.empty(16, 8, dtype=torch.bfloat16))
        part = add(torch.ops.aten.slice.Tensor, (rows, 0, 0, 8), rows.meta["val"][:8])
        turned = add(torch.ops.aten.t.default, (product,), product.meta["val"].t())
        loop = add(torch.ops.aten.neg.default, (x,), torch.empty_like(narrow))
    source = {"product": product, "turned": turned, "input": x, "loop": loop, "part": part, "read": product}[kind]
    cast = add(torch.ops.prims.convert_element_type.default, (source, torch.float32), wide)
    last = add(torch.ops.aten.mm.default, (x, x), narrow)
    results = [cast, last]
    if kind == "read":
        results.append(add(torch.ops.aten.neg.default, (cast,), wide))
    graph.output(tuple(results))
    return graph


@pytest.mark.parametrize("kind", ["product", "turned", "input", "loop", "part", "read"])
def test_casts_of_products_that_are_only_returned_come_last(kind: str) -> None:
    graph = graph_of(kind)
    cast_gradients_late(graph)
    graph.lint()
    is_last = graph.output_node().prev.target is torch.ops.prims.convert_element_type.default
    assert is_last == (kind in ("product", "turned"))


class Narrowing(nn.Module):
    """A layer of many rows, and twelve of few behind it, whose gradients are there when that of the first is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.rest = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many = nn.functional.gelu(self.first(x)).view(-1, 32, 512)
        y: torch.Tensor = self.rest(many.mean(1))
        return y.float().square().mean()


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_wait_in_sixteen_bits(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is lower by most of half of the bytes of the gradients."""
    x = torch.randn(8192, 512)
    found, peaks = [], []
    for widens in (_widens, lambda cast: False):
        monkeypatch.setattr(sys.modules["gact_fx.passes.cast_late"], "_widens", widens)
        torch.manual_seed(0)
        model = Narrowing()

        def loss(model: nn.Module = model) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y: torch.Tensor = model(x)
                return y

        gact_fx.compile(model, budget_bits=4, inner=inner, sample_batches=[x], loss_fn=lambda model, batch: loss(model))
        loss().backward()
        found.append(gradients(model))
        model.zero_grad(set_to_none=True)
        peaks.append(peak_bytes(loss).backward)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[0] < peaks[1] - 0.4 * sum(gradient.nbytes for gradient in found[0])
