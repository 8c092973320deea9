"""Elements of a saved tensor are found again where operators compute with them and move them."""

from collections.abc import Callable
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gact_fx.codec.code import Code
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.profiling.chains import Chain
from gact_fx.profiling.elements import between, follow, is_elementwise, moves_read
from gact_fx.profiling.measure_chain import measure_sample, measure_whole
from gact_fx.profiling.neighbours import ROUNDINGS, draw

SHAPE = (2, 8, 4, 32)
BESIDE = torch.linspace(-1, 1, 2 * 4 * 4 * 32).view(2, 4, 4, 32)
ROWS = torch.tensor([2, 0, 2, 2, 1])


def channels_last(x: Tensor) -> Tensor:
    """By channel, as normalisation goes."""
    return x.permute(0, 3, 1, 2).sigmoid().view(2, 4, 8, 8, 4) * torch.arange(4.0).view(1, 4, 1, 1, 1)


def joined(x: Tensor) -> Tensor:
    return torch.cat([BESIDE, x], 1).exp() + torch.arange(12.0).view(1, 12, 1, 1)


def enlarged(x: Tensor) -> Tensor:
    """To twice the size, as nearest neighbours are under Inductor."""
    return x[:, :, torch.arange(8)[:, None] // 2, torch.arange(64) // 2].sin()


def looked_up(x: Tensor) -> Tensor:
    """Some elements several times, others never."""
    return x[:, :, ROWS].tanh()[:, 1:6].transpose(1, 2)


def half(x: Tensor) -> Tensor:
    return F.gelu(x.sin().chunk(2, 1)[1]).square()


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2)).cos().flip(-1)


def expanded(x: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(2, 3, *SHAPE[1:]).cos() * torch.arange(3.0).view(1, 3, 1, 1, 1)


FOLLOWED = [channels_last, joined, enlarged, looked_up, half, padded, expanded]


def traced(function: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, fx.Node, list[fx.Node], fx.Node]:
    """The start of the chain, what follows from it, and its end."""
    module = make_fx(function)(torch.zeros(SHAPE))
    start, inside = next(iter(module.graph.nodes)), set[fx.Node]()
    for node in module.graph.nodes:
        if node is start or (node.op == "call_function" and inside & set(node.all_input_nodes)):
            inside.add(node)
    (end,) = module.graph.output_node().all_input_nodes
    return module, start, sorted(inside), end


def outside_of(module: fx.GraphModule, nodes: set[fx.Node]) -> dict[fx.Node, Any]:
    interpreter, found = fx.Interpreter(module, garbage_collect_values=False), {}
    interpreter.run(torch.zeros(SHAPE))
    for node in nodes:
        found[node] = interpreter.env[node]
    return found


@pytest.mark.parametrize("function", FOLLOWED)
def test_elements_are_those_of_the_whole(function: Callable[[Tensor], Tensor]) -> None:
    module, start, inside, end = traced(function)
    assert is_elementwise(start, inside, [end])
    chosen = torch.tensor([0, 3, 31, 64, 150, 330, 500, 777, 1024, 1500, 1700, 2047])
    chain = between(start, inside, [end])
    interpreter = GraphInterpreter(module)
    values = outside_of(module, moves_read(chain, start))
    elements = follow(start, chain, torch.Size(SHAPE), chosen, values, interpreter.call_function)
    reads = {i for node in chain for i in node.all_input_nodes if i not in inside}
    evaluate = Chain(start, inside, [end], outside_of(module, reads), interpreter)

    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    whole = function(x)
    of = elements[end]
    assert of.shape == whole.shape
    found = evaluate.evaluate_at(x.view(-1)[chosen], elements)[end]
    torch.testing.assert_close(found, whole.reshape(-1)[of.positions])
    origins = torch.arange(len(chosen)) if of.origins is None else of.origins
    for number, place in enumerate(chosen):
        other = x.clone()
        other.view(-1)[place] += 0.5
        changed = (function(other) != whole).reshape(-1).nonzero().squeeze(-1)
        # Times zero, an element is in its place and has no say.
        assert set(changed.tolist()) <= set(of.positions[origins == number].tolist())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x * 2], 1).sin(),
        lambda x: x + x.flip(0),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1],
        lambda x: F.pad(x, (1, 1), value=1.0).sin(),
        lambda x: x.view(-1, 1) * x.view(1, -1)[:, :4],
    ],
)  # fmt: skip
def test_what_mixes_elements_is_not_elementwise(function: Callable[[Tensor], Tensor]) -> None:
    _, start, inside, end = traced(function)
    assert not is_elementwise(start, inside, [end])


@pytest.mark.parametrize("function", [channels_last, joined, half])
def test_a_sample_of_all_elements_measures_what_the_whole_does(function: Callable[[Tensor], Tensor]) -> None:
    module, start, inside, end = traced(function)
    chain = between(start, inside, [end])
    interpreter = GraphInterpreter(module)
    reads = {i for node in chain for i in node.all_input_nodes if i not in inside}
    evaluate = Chain(start, inside, [end], outside_of(module, reads), interpreter)
    everywhere = torch.arange(2048)
    values = outside_of(module, moves_read(chain, start))
    elements = follow(start, chain, torch.Size(SHAPE), everywhere, values, interpreter.call_function)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPE, generator=generator)
    slopes = [torch.randn(end.meta["val"].shape, generator=generator) for _ in range(2)]
    own = [torch.randn(SHAPE, generator=generator) for _ in range(2)]
    picked = {end: [slope.reshape(-1)[elements[end].positions] for slope in slopes]}
    sampled = measure_sample(evaluate, x, picked, own, elements, is_tame=True)
    whole = measure_whole(evaluate, set(inside), x, {end: slopes}, own)
    for code, added in sampled.items():
        assert added.first == pytest.approx(whole[code].first, rel=1e-5)
        if function is not joined:
            # Where tensors are joined, the whole takes two draws.
            assert added.variance == pytest.approx(whole[code].variance, rel=1e-4)
        else:
            assert added.variance == pytest.approx(whole[code].variance, rel=0.2)


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("mixed", [lambda x: F.avg_pool2d(x, 2), lambda x: x @ torch.ones(32, 8)], ids=["pool", "mm"])
def test_the_bias_of_elements_that_mix_is_that_of_many_draws(mixed: Callable[[Tensor], Tensor], rounding: str) -> None:
    module, start, inside, end = traced(lambda x: mixed(F.gelu(x).square()))
    reads = {i for node in between(start, inside, [end]) for i in node.all_input_nodes if i not in inside}
    chain = Chain(start, inside, [end], outside_of(module, reads), GraphInterpreter(module))
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    exact = chain.evaluate(x)[end]
    found = measure_whole(chain, set(inside), x, {end: [torch.ones_like(exact)]}, [torch.zeros(SHAPE)])
    for bits in (2, 4):
        beside = ROUNDINGS[rounding](x, bits)
        draws = [float((chain.evaluate(draw(beside, rounding, seed))[end] - exact).sum()) for seed in range(200)]
        added = found[Code(bits, rounding, 256)]
        assert (added.own_bias + added.coherent_bias) ** 0.5 == pytest.approx(abs(fmean(draws)), rel=0.1)
        assert added.own_bias + added.coherent_bias > 10 * pvariance(draws) / 200


def test_elements_with_several_places_change_the_gradient_together() -> None:
    """The error of an element is the same wherever it was copied."""
    module, start, inside, end = traced(enlarged)
    chain = between(start, inside, [end])
    assert is_elementwise(start, inside, [end])
    interpreter = GraphInterpreter(module)
    values = outside_of(module, moves_read(chain, start))
    elements = follow(start, chain, torch.Size(SHAPE), torch.arange(2048), values, interpreter.call_function)
    evaluate = Chain(start, inside, [end], {**values}, interpreter)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    own = [torch.ones(SHAPE)]

    def measured(slope: Tensor) -> float:
        picked = {end: [slope.reshape(-1)[elements[end].positions]]}
        return next(iter(measure_sample(evaluate, x, picked, own, elements, is_tame=True).values())).variance

    together = torch.ones(end.meta["val"].shape)
    apart = together.clone()
    apart[..., ::2] = -1
    assert measured(together) > 0
    assert measured(apart) == pytest.approx(0, abs=1e-6 * measured(together))
