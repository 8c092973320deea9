"""What backward does to a gradient, element by element, becomes one coefficient where it bends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Trace, run_pass
from torch import fx, nn
from torch.nn import functional as F

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.linearity import is_affine, is_linear, is_pointwise
from gact_fx.passes.find_bends import is_tame, poles

WEIGHT = nn.Parameter(torch.randn(64, 64))
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": F.elu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "huber": lambda y: F.huber_loss(y, torch.zeros_like(y), delta=0.3, reduction="none"),
    "dropout of gelu": lambda y: F.gelu(y) * (y.detach() > 0.1),
    # What the second one's derivative gives is read twice: the first one's region begins where the second one's ends.
    "regions in a chain": lambda y: F.softplus(y).mul(torch.linspace(-1, 1, 64)) + F.elu(F.softplus(y)),
    "a remainder": lambda y: (lambda r: r.tanh() + r * WEIGHT[:32].detach())(torch.remainder(y.flip(0), y)),
}


def merged(pair: GraphPair) -> list[str]:
    return [node.name for node in pair.backward.graph.nodes if node.name.endswith("_merged")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_stays_what_it_was(trace: Trace, name: str) -> None:
    function = FUNCTIONS[name]
    x, tangent = torch.randn(32, 64) * 3, torch.randn(32, 64)
    pairs = [trace(lambda x: function(x @ WEIGHT), x), trace(lambda x: function(x @ WEIGHT), x)]
    run_pass("merge_coefficients", pairs[1])
    assert merged(pairs[1]) and not merged(pairs[0])
    results = []
    for pair in pairs:
        outputs = pair.forward(*_inputs(pair, x))
        saved = outputs[pair.num_user_outputs :]
        results.append([g for g in pair.backward(*saved, tangent) if g is not None])
    for found, exact in zip(results[1], results[0], strict=True):
        assert (found - exact).norm() < 1e-5 * exact.norm()


def _inputs(pair: GraphPair, x: torch.Tensor) -> list[torch.Tensor]:
    inputs = pair.forward.graph.find_nodes(op="placeholder")
    return [x if tuple(node.meta["val"].shape) == x.shape else WEIGHT.detach() for node in inputs]


def test_one_decision_beside_values_is_left_to_itself(trace: Trace) -> None:
    """It costs one bit, or nothing where codes can tell it."""
    pair = trace(lambda x: (x @ WEIGHT).relu().square().sum(), torch.randn(32, 64))
    run_pass("expose_decisions", pair)
    run_pass("merge_coefficients", pair)
    assert not merged(pair)


@pytest.mark.parametrize(
    "clip", [lambda t: t.clamp(-1000, 1000), lambda t: t.nan_to_num(0.0, 0.0, 0.0), lambda t: F.hardshrink(t, 1e-6)]
)
def test_what_clips_gradients_is_not_linear(clip: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Nor is a gradient that it clips merged with what follows; its threshold may be far from the numbers tried."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4)
    traced = fx.symbolic_trace(clip)
    (call,) = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
    targets = {"clamp": torch.ops.aten.clamp.default, "nan_to_num": torch.ops.aten.nan_to_num.default}
    target = targets.get(str(call.target), torch.ops.aten.hardshrink.default)
    assert not is_linear(graph.call_function(target, (x, *call.args[1:])), [x])


def test_factors_that_overflow_by_themselves_are_not_multiplied(trace: Trace) -> None:
    weight = nn.Parameter(torch.randn(64, 64).half())
    pair = trace(lambda x: F.elu(x @ weight) * 300.0 * 300.0, torch.randn(32, 64).half())
    run_pass("merge_coefficients", pair)
    assert not merged(pair)


def node(target: Any, *args: object) -> tuple[fx.Node, list[fx.Node]]:
    """A call of ``target``, where "x" is a tensor that varies and "y" another."""
    graph = fx.Graph()
    names = {name: graph.placeholder(name) for name in ("x", "y", "mask")}
    for name, placeholder in names.items():
        placeholder.meta["val"] = torch.empty(4, 4, dtype=torch.bool if name == "mask" else torch.float32)
    given: tuple[Any, ...] = tuple(names.get(a, a) if isinstance(a, str) else a for a in args)
    call = graph.call_function(target, given)
    return call, [names["x"]]


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("call", "linear", "affine"),
    [
        (node(aten.mul.Tensor, "x", "y"), True, True),
        (node(aten.div.Tensor, "x", "y"), True, True),
        (node(aten.div.Tensor, "y", "x"), False, False),
        (node(aten.add.Tensor, "x", "y"), False, True),
        (node(aten.mul.Tensor, "x", "x"), False, False),
        (node(aten.where.self, "mask", "x", "y"), False, True),
        (node(aten.relu.default, "x"), False, False),
        (node(aten.clamp.default, "x", -50.0, 50.0), False, False),
        (node(aten.elu_backward.default, "x", 1.0, 1.0, 1.0, False, "y"), True, True),
        (node(aten.pow.Tensor_Scalar, "x", 1), True, True),
        (node(aten.pow.Tensor_Scalar, "x", 1.5), False, False),
    ],
)
def test_linearity_is_found_out_by_numbers(call: tuple[fx.Node, list[fx.Node]], linear: bool, affine: bool) -> None:
    assert is_linear(*call) is linear
    assert is_affine(*call) is affine


def test_poles_are_found_out_by_numbers() -> None:
    def is_total(call: fx.Node, inputs: list[fx.Node]) -> bool:
        call.graph.output(call)
        return is_tame({call, *inputs}, inputs[:1])

    assert is_total(*node(aten.tanh.default, "x")) and is_total(*node(aten.exp.default, "x"))
    for target in (aten.log.default, aten.sqrt.default, aten.reciprocal.default, aten.asin.default):
        assert not is_total(*node(target, "x"))
    # Defined everywhere, it jumps.
    assert not is_total(*node(aten.sign.default, "x"))
    # Its pieces have poles: exp overflows, and a quotient is not defined everywhere.
    sigmoid, (x,) = node(aten.neg.default, "x")
    for target, *args in ((aten.exp.default,), (aten.add.Tensor, 1), (aten.reciprocal.default,)):
        sigmoid = sigmoid.graph.call_function(target, (sigmoid, *args))
        sigmoid.meta["val"] = x.meta["val"]
    sigmoid.graph.output(sigmoid)
    assert is_tame(set(sigmoid.graph.nodes) - set(sigmoid.users), [x])
    assert not is_tame({sigmoid.all_input_nodes[0], sigmoid}, sigmoid.all_input_nodes[:1])


def test_a_cast_to_fewer_bits_is_no_pole() -> None:
    power, (x,) = node(aten.pow.Tensor_Scalar, "x", 4)
    cast = power.graph.call_function(aten._to_copy.default, (power,), {"dtype": torch.float16})
    cast.meta["val"] = x.meta["val"].half()
    cast.graph.output(cast)
    assert not poles({x, power, cast}, [x])


def test_a_pole_that_something_shifts() -> None:
    quotient, (x,) = node(aten.add.Tensor, "x", "y")
    quotient = quotient.graph.call_function(aten.reciprocal.default, (quotient,))
    quotient.meta["val"] = x.meta["val"]
    quotient.graph.output(quotient)
    assert not is_tame(set(quotient.graph.nodes) - set(quotient.users), [x])


@pytest.mark.parametrize(("combine", "options"), [(aten.add.Tensor, ()), (aten.lerp.Scalar, (0.3,))], ids=str)
def test_a_pole_that_two_tensors_lead_to(combine: Any, options: tuple[object, ...]) -> None:
    both, (x,) = node(combine, "x", "y", *options)
    both.meta["val"] = x.meta["val"]
    root = both.graph.call_function(aten.pow.Tensor_Scalar, (both, 0.5))
    root.meta["val"] = x.meta["val"]
    root.graph.output(root)
    for start in both.all_input_nodes:
        assert poles({start, both, root}, [start]) == {root}


def test_which_derivatives_work_element_by_element() -> None:
    def is_local(target: Any, x: list[int], *args: object) -> bool:
        call, (given,) = node(target, "y", "x", *args)
        given.meta["val"], call.meta["val"] = torch.empty(x), torch.empty(x)
        call.all_input_nodes[0].meta["val"] = torch.empty([1] * len(x) if target in POOLS else x)
        return is_pointwise(call)

    assert is_local(aten.hardtanh_backward.default, [4, 4], -1.0, 1.0)
    assert is_local(aten.leaky_relu_backward.default, [4, 4], 0.1, False)
    assert not is_local(aten.glu_backward.default, [4, 4], 1)
    assert not is_local(aten._adaptive_avg_pool2d_backward.default, [1, 4, 4])
    assert not is_local(aten.avg_pool2d_backward.default, [1, 4, 4], [3, 3], [1, 1], [1, 1], False, True, None)

    # Not of a gradient of one element, which would be taken for a pooled image.
    call, (given,) = node(aten._adaptive_avg_pool2d_backward.default, "y", "x")
    for each in (call, given, call.all_input_nodes[0]):
        each.meta["val"] = torch.empty(4, 8, 8, 8)
    assert not is_pointwise(call)


POOLS = (aten._adaptive_avg_pool2d_backward.default,)
