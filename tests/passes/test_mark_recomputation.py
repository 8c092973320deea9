"""What the partitioner saves and recomputes once the joint graph is marked."""

from collections.abc import Callable

import pytest
import torch
from conftest import Trace
from torch import nn
from torch.nn import functional as F

from gact_fx.graphs.aot import GraphPair

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
RECOMPUTE = pytest.mark.parametrize("recompute", ["auto", "off"])
Function = Callable[[torch.Tensor], torch.Tensor]
X = torch.randn(64, 16)
V, W, G = nn.Parameter(torch.randn(16, 64)), nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.rand(16, 1))


def saved(pair: GraphPair) -> list[torch.fx.Node]:
    """What is saved beside views of forward's inputs."""
    return [value.source for value in pair.saved_values() if not _is_input(value.source)]


def _is_input(node: torch.fx.Node) -> bool:
    while node.target in (torch.ops.aten.permute.default, torch.ops.aten.t.default):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


def recomputed(pair: GraphPair) -> set[str]:
    """Operators of backward."""
    return {str(node.target).split(".")[1] for node in pair.backward.graph.nodes if "." in str(node.target)}


@INNER
@pytest.mark.parametrize("activation", [F.gelu, F.relu, F.silu, torch.tanh])
def test_one_side_of_a_pointwise_operator_is_saved(trace: Trace, inner: str, activation: Function) -> None:
    pair = trace(lambda x: (activation(x @ V) @ W).sum(), X, inner=inner, recompute="auto")
    assert sum(node.meta["val"].numel() for node in saved(pair)) == 64 * 64


@INNER
def test_what_the_batch_gives_cheaply_is_computed_again(trace: Trace, inner: str) -> None:
    tokens, table = torch.randint(0, 100, (8, 32)), nn.Parameter(torch.randn(100, 16))

    def function(image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pixels = (image.float() / 255 - 0.5).bfloat16() @ V.bfloat16()
        words = F.embedding(ids, table) * 4 + ids[..., None].float().sin()
        return pixels.float().sum() + (words.tanh() @ V).sum()

    pair = trace(function, torch.randint(0, 256, (64, 16), dtype=torch.uint8), tokens, inner=inner, recompute="auto")
    assert not saved(pair)
    # An activation from another graph is not there anyway.
    upstream = trace(lambda x: (x.bfloat16() @ V.bfloat16()).sum(), X, inner=inner, recompute="auto", upstream=True)
    assert [node.meta["val"].dtype for node in saved(upstream)] == [torch.bfloat16]


def test_what_only_widens_and_scales_is_computed_again(trace: Trace) -> None:
    weights = [nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16)) for _ in range(3)]

    def function(x: torch.Tensor) -> torch.Tensor:
        query, key, value = ((x @ weight).view(4, 16, 2, 32).transpose(1, 2) for weight in weights)
        # PyTorch widens and scales query and key, and multiplies in float32.
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1).sum()

    pair = trace(function, torch.randn(4, 16, 64, dtype=torch.bfloat16), inner="inductor", recompute="auto")
    kept = [node.meta["val"] for node in saved(pair)]
    assert [x.shape for x in kept if x.dtype is torch.float32 and x.numel() >= 4 * 16 * 64] == []
    assert {"convert_element_type", "mul"} <= recomputed(pair)


def test_seeds_are_saved_and_masks_drawn_again(trace: Trace) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(F.dropout((x @ V).tanh(), 0.5) @ W, 0.1)).sum()

    pair = trace(function, X, inner="inductor", recompute="auto")
    kept = saved(pair)
    seeds = [node for node in kept if "lookup_seed" in str(node.target)]
    assert [node.meta["val"].nbytes for node in seeds] == [8, 8]
    assert {"inductor_random", "gt"} <= recomputed(pair) and "inductor_seeds" not in recomputed(pair)
    assert not any(node.meta["val"].dtype is torch.bool for node in kept)


def test_dropout_of_eager_never_runs_twice(trace: Trace) -> None:
    pair = trace(lambda x: (F.dropout((x @ V).tanh(), 0.5) @ W).sum(), X, inner="eager", recompute="auto")
    assert "native_dropout" not in recomputed(pair)
    assert [node.meta["val"].shape for node in saved(pair) if node.meta["val"].dtype is torch.bool] == [(64, 64)]


# Of y, which is saved anyway, so that nothing but the marks keeps them from being computed again.
SAVED_OPERATORS: dict[str, Function] = {
    "mm": lambda y: y.tanh() @ W,
    "bmm": lambda y: torch.bmm(y[None].sin(), W[None]).tanh(),
    "var_mean": lambda y: F.layer_norm(y, (64,)) @ W,
    "amax": lambda y: y.softmax(-1) @ W,
    "argmax": lambda y: y.tanh().gather(1, y.argmax(1, keepdim=True)) * W[0, 0],
    "sort": lambda y: y.sort(dim=1)[0],
    "topk": lambda y: y.topk(4, dim=1)[0],
    "cumsum": lambda y: y.cumsum(1).tanh() @ W,
    "native_layer_norm": lambda y: F.layer_norm(y, (64,)) @ W,
    "_softmax": lambda y: y.softmax(-1) @ W,
}


@INNER
@pytest.mark.parametrize("name", SAVED_OPERATORS)
def test_what_is_dear_or_decides_never_runs_twice(trace: Trace, inner: str, name: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ V
        return SAVED_OPERATORS[name](y).square().sum() + y.sin().sum()

    pair = trace(function, X, inner=inner, recompute="auto")
    ran, again = (
        {node.name for node in graph.nodes if node.op == "call_function" and name in str(node.target).split(".")}
        for graph in (pair.forward.graph, pair.backward.graph)
    )
    # A recomputed node has its name in both graphs. Normalisations are other operators in eager mode.
    assert not ran & again and (ran or name in ("var_mean", "amax", "native_layer_norm", "_softmax"))


@INNER
@RECOMPUTE
def test_what_comes_from_parameters_alone_is_computed_again(trace: Trace, inner: str, recompute: str) -> None:
    def weight_norm(x: torch.Tensor) -> torch.Tensor:
        return ((x @ V) @ (W * G[0] / W.norm(dim=0, keepdim=True)).exp()).tanh().sum()

    pair = trace(weight_norm, X, inner=inner, recompute=recompute)
    products = {"mm", "tanh", "detach", "permute", "t", "placeholder"}
    assert {str(node.target).split(".")[1] if "." in str(node.target) else node.op for node in saved(pair)} <= products
    assert "exp" in recomputed(pair)


@INNER
@RECOMPUTE
def test_casts_of_weights_are_not_saved(trace: Trace, inner: str, recompute: str) -> None:
    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(F.linear(x, V.t()).tanh(), W.t()).float().sum()

    pair = trace(autocast, X, inner=inner, recompute=recompute)
    assert not any(node.meta["val"].shape in ((64, 8), (8, 64)) for node in saved(pair))
    # The parameter itself is what backward starts from.
    storages = {node.meta["val"].untyped_storage()._cdata for node in pair.forward.graph.find_nodes(op="placeholder")}
    values = [value.source.meta["val"] for value in pair.saved_values()]
    (kept,) = [value for value in values if value.shape == W.shape]
    assert kept.dtype is torch.float32 and kept.untyped_storage()._cdata in storages


@INNER
@RECOMPUTE
def test_constants_are_made_again(trace: Trace, inner: str, recompute: str) -> None:
    pair = trace(lambda x: ((x @ V) * torch.arange(64.0).sin()).tanh().sum(), X, inner=inner, recompute=recompute)
    assert [tuple(node.meta["val"].shape) for node in saved(pair)] == [(64, 64)]
    assert "sin" in recomputed(pair)


@INNER
def test_softmax_over_edges_saves_its_exponential(trace: Trace, inner: str) -> None:
    """What the exponential comes from has to be exact, and would be most of what is saved."""
    edges = torch.randint(0, 16, (500,))

    def function(x: torch.Tensor) -> torch.Tensor:
        scores = (x @ V).sum(0)[:16].index_select(0, edges) * 0.1
        exponential = scores.exp()
        total = torch.zeros(16).scatter_add(0, edges, exponential)
        return (exponential / total.index_select(0, edges)).square().sum()

    kept = [str(node.target) for node in saved(trace(function, X, inner=inner, recompute="auto"))]
    assert "aten.exp.default" in kept
