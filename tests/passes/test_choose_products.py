import copy
import itertools

import pytest
import torch
from conftest import Mixed, Trace, analyze, gradients, mixed_batch, relative_error
from torch import nn

import gact_fx
from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.passes.choose_products import USUAL_BITS, choose_products, usual_memory
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.pipeline import Context


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def chosen_of(trace: Trace, budget_bytes: int | None = None) -> tuple[GraphPair, frozenset[str]]:
    pair = trace(Deep(), torch.randn(64, 64), recompute="auto", inner="inductor")
    graph = JointGraph(pair.forward, (), lambda index: False, 0)
    context = Context(Config(budget_bytes=budget_bytes), try_cut=lambda joint, products: (pair, analyze(pair)))
    return pair, choose_products(graph, context)


def test_no_product_is_rebuilt_from_another_that_is(trace: Trace) -> None:
    pair, chosen = chosen_of(trace)
    products = [n for n in pair.forward.graph.nodes if str(n.target) in ("aten.addmm.default", "aten.mm.default")]
    # Every other one of a chain: what it is computed from stays.
    places = [i for i, node in enumerate(products) if node.name in chosen]
    assert places and all(b - a >= 2 for a, b in itertools.pairwise(places))


def test_no_more_than_the_budget_asks_for(trace: Trace) -> None:
    pair, _ = chosen_of(trace)
    usual = usual_memory(pair, analyze(pair), USUAL_BITS, fused=True).activations
    assert chosen_of(trace, usual)[1] == frozenset()
    assert len(chosen_of(trace, usual - 1)[1]) == 1


def test_no_product_where_that_raises_the_peak(trace: Trace) -> None:
    pair = trace(Deep(), torch.randn(64, 64), recompute="auto", inner="inductor")
    wider = trace(Deep(), torch.randn(192, 64), recompute="auto", inner="inductor")
    graph = JointGraph(pair.forward, (), lambda index: False, 0)

    def chosen(budget_bytes: int | None, then: GraphPair) -> frozenset[str]:
        def cut(joint: JointGraph, products: frozenset[str]) -> tuple[GraphPair, GraphAnalysis]:
            found = then if products else pair
            return found, analyze(found)

        return choose_products(graph, Context(Config(budget_bytes=budget_bytes), try_cut=cut))

    assert chosen(1, pair) and not chosen(1, wider)
    assert chosen(None, pair) and not chosen(None, wider)


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_full_recomputation_holds_less_and_keeps_the_gradient(inner: str) -> None:
    held = {}
    for recompute in ("auto", "full"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, reference = Mixed(), Mixed()
        reference.load_state_dict(model.state_dict())
        batch = mixed_batch(32)
        gact_fx.compile(model, budget_bits=8, recompute=recompute, inner=inner, sample_batches=[batch])
        model(*batch).backward()
        reference(*batch).backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.02
        held[recompute] = gact_fx.inspect(model).bytes_after
    assert held["full"] < 0.85 * held["auto"]


def test_products_that_would_raise_the_peak_are_left_out_and_no_others() -> None:
    held, peaks = {}, {}
    for recompute in ("auto", "full"):
        model, batch = Mixed(), mixed_batch(32)
        gact_fx.compile(model, budget_bits=4, recompute=recompute, inner="eager", sample_batches=[batch])
        model(*batch).backward()
        model.zero_grad(set_to_none=True)
        with gact_fx.measure_peak(model) as peak:
            model(*batch).backward()
        assert peak.nbytes is not None
        held[recompute], peaks[recompute] = gact_fx.inspect(model).bytes_after, peak.nbytes
    assert held["full"] < held["auto"]
    assert peaks["full"] <= peaks["auto"]


@pytest.mark.slow
def test_a_budget_in_bytes_is_kept() -> None:
    model, batch = Mixed(), mixed_batch(32)
    gact_fx.compile(model, inner="eager", sample_batches=[batch])
    model(*batch).backward()
    usual = gact_fx.inspect(model).bytes_after
    wanted = int(usual * 0.6)
    smaller = gact_fx.compile(Mixed(), inner="eager", budget_bytes=wanted, recompute="full", sample_batches=[batch])
    smaller(*batch).backward()
    assert 0.8 * wanted < gact_fx.inspect(smaller).bytes_after <= wanted


def test_products_of_one_element() -> None:
    x = torch.randn(1, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh())
    reference = copy.deepcopy(model)
    gact_fx.compile(model, recompute="full", min_elements=1, inner="eager", adaptive=False, budget_bits=8)
    for _ in range(2):
        model(x).sum().backward(), reference(x).sum().backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.05
