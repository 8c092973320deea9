"""The adjoint's sensitivities against GACT's Algorithm 1, and against a case known in closed form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Mixed, mixed_batch
from live_bytes import LiveBytes
from test_recompute_attention import Attention
from torch import fx, nn
from torch.nn import functional as F

from gact_fx.codec.code import Code
from gact_fx.config import Config
from gact_fx.profiling import adjoint as adjoint_module
from gact_fx.profiling.adjoint import Adjoint
from gact_fx.profiling.cut_backward import cut_backward, find_loads, group_segments, summands
from gact_fx.profiling.measure_adjoint import measure_adjoint
from gact_fx.profiling.measure_sensitivity import measure_sensitivity
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.recorder import Recorder
from gact_fx.profiling.rounding_meter import RoundingMeter
from gact_fx.profiling.tape import Step
from gact_fx.training.backend import Backend
from gact_fx.training.session import Session

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
Values = dict[tuple[int, str], float]


def record(
    function: Callable[..., torch.Tensor], *batch: torch.Tensor, inner: str = "eager", **options: Any
) -> list[Step]:
    """One training step of ``function``, as profiling sees it."""
    recorder = Recorder(lambda steps, gradients: True)
    backend = Backend(Session(Config(min_elements=64, inner=inner, **options)), interpreted=True, recorder=recorder)
    compiled = torch.compile(lambda *inputs: function(*inputs), backend=backend)
    recorder.start()
    compiled(*batch).backward()
    return recorder.take()


@torch.no_grad()
def measured(steps: list[Step], probes: int) -> list[tuple[dict[str, RoundingMeter], frozenset[str]]]:
    return [(found.meters, found.opaque) for found in measure_adjoint(steps, probes=probes)]


def adjoint(steps: list[Step], probes: int = 16) -> Values:
    """c_l of every tensor that the adjoint reaches."""
    return {
        (i, name): meter.result((256,)).value
        for i, (meters, opaque) in enumerate(measured(steps, probes=probes))
        for name, meter in meters.items()
        if name not in opaque
    }


@torch.no_grad()
def empirical(steps: list[Step], draws: int = 64) -> Values:
    return {(i, n): v for i, found in enumerate(measure_sensitivity(steps, draws=draws)) for n, v in found.items()}


def agree(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys() and len(found) > 1
    ratios = torch.tensor([found[key] / wanted[key] for key in wanted])
    assert 0.8 <= float(ratios.median()) <= 1.25
    assert float(ratios.log().abs().max()) < 0.7, ratios
    assert rank_correlation(list(found.values()), [wanted[key] for key in found]) >= 0.95 or len(found) < 8


def rank_correlation(left: list[float], right: list[float]) -> float:
    ranks = torch.stack([torch.tensor(values).argsort().argsort().double() for values in (left, right)])
    return float(torch.corrcoef(ranks)[0, 1])


@INNER
def test_it_reaches_every_tensor(inner: str) -> None:
    ((meters, opaque),) = measured(record(Mixed(), *mixed_batch(), inner=inner), probes=1)
    assert meters and not opaque


@INNER
def test_it_agrees_with_algorithm_1(inner: str) -> None:
    steps = record(Mixed(), *mixed_batch(), inner=inner)
    found = adjoint(steps)
    assert len(found) >= 8
    agree(found, empirical(steps))


class Broken(nn.Module):
    """Three graphs; the last two read the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x).tanh() * 2
        torch._dynamo.graph_break()
        a = self.layers[1](h).sigmoid()
        torch._dynamo.graph_break()
        return (self.layers[2](h).tanh() * a).square().sum()


def test_through_graph_breaks_and_an_output_read_twice() -> None:
    model, x = Broken(), torch.randn(64, 48)
    steps = record(model, x)
    assert len(steps) == 3 and all(step.flows for step in steps[1:])
    agree(adjoint(steps), empirical(steps))


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_the_parts_of_a_gradient_stand_for_their_sum(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a weight that is used three times is never made, and measured as if it were."""
    torch.manual_seed(0)
    weight, batch = nn.Parameter(torch.randn(32, 32) / 6), torch.randn(48, 32)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(F.gelu(F.linear(x, weight)), weight)), weight).square().mean()

    found = []

    def count(node: fx.Node, sums: set[fx.Node]) -> list[fx.Node]:
        found.append(summands(node, sums))
        return found[-1]

    monkeypatch.setattr("gact_fx.profiling.adjoint.summands", count)
    steps = record(loss, batch, inner=inner)
    of_parts = adjoint(steps)
    assert max(map(len, found)) == 3
    monkeypatch.setattr("gact_fx.profiling.adjoint.summands", lambda node, sums: [node])
    assert of_parts == pytest.approx(adjoint(steps), rel=0.01)


def test_a_graph_break_changes_nothing() -> None:
    """In total: what the tensors are called differs."""
    model, x = Broken(), torch.randn(64, 48)
    broken = adjoint(record(model, x), probes=32)
    torch._dynamo.reset()
    whole = record(lambda x: unbroken(model, x), x)
    assert len(whole) == 1
    assert max(broken.values()) == pytest.approx(max(adjoint(whole, probes=32).values()), rel=0.3)


def unbroken(model: Broken, x: torch.Tensor) -> torch.Tensor:
    h = model.layers[0](x).tanh() * 2
    return (model.layers[2](h).tanh() * model.layers[1](h).sigmoid()).square().sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention(is_causal: bool) -> None:
    steps = record(Attention(1.0, is_causal), torch.randn(4, 64, 32))
    assert any("flash" in str(node.target) for node in steps[0].backward.graph.nodes)
    agree(adjoint(steps), empirical(steps))


@INNER
def test_max_pool(inner: str) -> None:
    conv, head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 10)

    def function(x: torch.Tensor) -> torch.Tensor:
        return head(F.max_pool2d(conv(x).tanh(), 2).flatten(1)).tanh().square().sum()

    steps = record(function, torch.randn(16, 3, 8, 8), inner=inner)
    agree(adjoint(steps), empirical(steps))


NORMALISATIONS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(64),
    "batch, evaluating": lambda: nn.BatchNorm1d(64).eval(),
    "layer": lambda: nn.LayerNorm(64),
    "group": lambda: nn.GroupNorm(4, 64),
    "root mean square": lambda: nn.RMSNorm(64),
}


@INNER
@pytest.mark.parametrize("name", NORMALISATIONS)
def test_the_statistics_of_normalisation_stay_as_they_were_saved(name: str, inner: str) -> None:
    torch.manual_seed(0)
    first, norm, last = nn.Linear(32, 64), NORMALISATIONS[name](), nn.Linear(64, 32)
    x, t = torch.randn(128, 32), torch.randn(128, 32)
    # Little deviation and a large mean, so that what the statistics would add is most of the derivative.
    steps = record(lambda x: (last(norm(first(x) * 0.1 + 1).tanh()) * t).sum(), x, inner=inner)
    found, wanted = adjoint(steps, probes=64), empirical(steps)
    assert found.keys() == wanted.keys() and found
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=0.3), key


def test_writing_in_place_has_a_derivative() -> None:
    weight = nn.Parameter(torch.randn(64, 64))

    def model(x: torch.Tensor) -> torch.Tensor:
        hidden = x @ weight
        written = hidden.clone()
        written[::2] = hidden[1::2].sin()
        return (written.tanh() @ weight).sum()

    ((meters, opaque),) = measured(record(model, torch.randn(32, 64)), probes=2)
    assert meters and not opaque


@pytest.fixture
def all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours stand for operators of PyTorch that have no second derivative."""
    monkeypatch.setattr("gact_fx.passes.find_readers.is_known", lambda node: True)


@pytest.mark.usefixtures("all_known")
def test_what_bends_in_front_of_an_operator_without_second_derivative() -> None:
    """It is as large that a sample of it stands for all, and nothing of it reaches a coefficient with a derivative."""
    first, second, third = (nn.Linear(64, 64) for _ in range(3))

    def function(x: torch.Tensor) -> torch.Tensor:
        scale = first(x).detach()
        return (scaled(second(x), scale.exp()) + scaled(third(x), scale.sin())).square().mean()

    steps = record(function, torch.randn(2048, 64))
    ((_, opaque),) = measured(steps, probes=1)
    assert opaque
    with torch.no_grad():
        found = measure_step(steps, Config(inner="eager"))
    assert found[0]


def test_dynamic_shapes() -> None:
    first, second, x = nn.Linear(48, 64), nn.Linear(64, 64), torch.randn(96, 48)
    torch._dynamo.mark_dynamic(x, 0)
    steps = record(lambda x: second(first(x).view(-1, 2, 64).tanh().flatten(0, 1)).tanh().square().sum(), x)
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in steps[0].backward.graph.find_nodes(op="placeholder"))
    agree(adjoint(steps), empirical(steps))


def test_it_takes_less_memory_than_training() -> None:
    torch.manual_seed(0)
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(12)), torch.randn(4096, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = F.gelu(layer(x))
        return x.square().mean()

    with LiveBytes() as training:
        function(x).backward()
    steps = record(function, x)
    with torch.no_grad(), LiveBytes() as profiling:
        measure_step(steps, Config(min_elements=64))
    assert profiling.peak < training.peak, (profiling.peak, training.peak)


@torch.library.custom_op("gact_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@torch.library.custom_op("gact_test::cube_backward", mutates_args=())
def cube_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Without a derivative of its own."""
    return 3 * x**2 * grad


cube.register_fake(torch.empty_like)
cube_backward.register_fake(lambda grad, x: torch.empty_like(x))
cube.register_autograd(
    lambda ctx, grad: cube_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class _Refusing(torch.autograd.Function):
    """As operators written in C++ do it: the derivative is there, and raises when it is computed."""

    @staticmethod
    def forward(ctx: object, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return refusing_backward(grad, x)

    @staticmethod
    def backward(ctx: object, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("gact_test::refusing_backward has no second derivative")


@torch.library.custom_op("gact_test::refusing", mutates_args=())
def refusing(x: torch.Tensor) -> torch.Tensor:
    return x**3


torch.library.define("gact_test::refusing_backward", "(Tensor grad, Tensor x) -> Tensor")
torch.library.impl("gact_test::refusing_backward", "CPU", lambda grad, x: 3 * x**2 * grad)
torch.library.impl("gact_test::refusing_backward", "Autograd", _Refusing.apply)
torch.library.register_fake("gact_test::refusing_backward", lambda grad, x: torch.empty_like(x))
refusing_backward = torch.ops.gact_test.refusing_backward.default
refusing.register_fake(torch.empty_like)
refusing.register_autograd(
    lambda ctx, grad: refusing_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("gact_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@torch.library.custom_op("gact_test::scaled_backward", mutates_args=())
def scaled_backward(grad: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return grad * scale


scaled.register_fake(lambda x, scale: torch.empty_like(x))
scaled_backward.register_fake(lambda grad, scale: torch.empty_like(grad))
scaled.register_autograd(
    lambda ctx, grad: (scaled_backward(grad, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


@pytest.mark.usefixtures("all_known")
@pytest.mark.parametrize("operator", [cube, refusing])
def test_what_has_no_second_derivative_is_left_to_algorithm_1(operator: Callable[..., torch.Tensor]) -> None:
    first, second = nn.Linear(48, 64), nn.Linear(64, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return second(operator(first(x))).tanh().square().sum()

    steps = record(function, torch.randn(96, 48))
    ((_, opaque),) = measured(steps, probes=4)
    saved = {tensor.name: tensor.op for tensor in steps[0].analysis.saved}
    wanted = empirical(steps)
    # The op's own input, and what reaches it through its tangent; what it returned only enters a product.
    assert {saved[name] for name in opaque} >= {"aten.addmm"}
    (found,) = measure_step(steps, Config(min_elements=64))
    assert {(0, name) for name in found} == wanted.keys()
    for (_, name), value in wanted.items():
        assert found[name].value == pytest.approx(value, rel=0.4), saved[name]


@INNER
def test_complex_values(inner: str) -> None:
    first, last = nn.Linear(32, 32), nn.Linear(32, 32)
    weight = nn.Parameter(torch.randn(17, dtype=torch.cfloat))

    def function(x: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(first(x)) * weight, n=32)
        return last(filtered.tanh()).square().sum()

    steps = record(function, torch.randn(64, 32), inner=inner)
    wanted = empirical(steps)
    with torch.no_grad():
        (found,) = measure_step(steps, Config(min_elements=64, profile_draws=16))
    assert {(0, name) for name in found} == wanted.keys() and found
    for (_, name), value in wanted.items():
        # What Algorithm 1 measures instead is one draw.
        assert found[name].value == pytest.approx(value, rel=0.4), name


def test_a_linear_layer_in_closed_form() -> None:
    """grad W = h^T t, with one column: element (i, k) of h moves it by t_i, so that a_ik = t_i^2 exactly."""
    v, w = nn.Parameter(torch.randn(16, 64)), nn.Parameter(torch.randn(64, 1))
    x, t = torch.randn(64, 16), torch.randn(64, 1)
    steps = record(lambda x, t: ((x @ v) @ w * t).sum(), x, t)
    (((meter,), opaque),) = [(tuple(m.values()), o) for m, o in measured(steps, probes=2)]
    assert not opaque
    groups = (x @ v).detach().view(-1, 256)
    weights = t.square().expand(64, 64).reshape(-1, 256).sum(1)
    spread = float((weights * (groups.amax(1) - groups.amin(1)).square()).sum())
    variances = meter.result((256,)).variances
    for bits in (1, 4, 8):
        assert variances[Code(bits, "dither", 256)] == pytest.approx(spread / 12 / (2**bits - 1) ** 2, rel=0.01)


class LastNorm(nn.Module):
    """A batch norm whose bias has a gradient in which none of the saved tensors is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.norm(self.conv(x)).relu().mean((2, 3))[:, :3].logsumexp(1).sum()
        return loss


@pytest.mark.parametrize("probes", [1, 2])
def test_a_result_of_no_saved_tensor_stops_nothing(probes: int) -> None:
    ((meters, opaque),) = measured(record(LastNorm(), torch.randn(4, 3, 16, 16)), probes=probes)
    assert meters and not opaque


def test_neighbouring_segments_are_in_groups_of_about_as_many() -> None:
    (step,) = record(lambda x, w: deep(x, w), torch.randn(64, 64), torch.randn(64, 64, requires_grad=True))
    nodes = step.backward.graph.nodes
    loads = find_loads(nodes)
    segments = cut_backward([node for node in nodes if node not in loads and node.op != "output"], loads)
    groups = group_segments(segments)
    assert [segment for group in groups for segment in group] == segments
    assert len(segments) > 6 and 2 <= len(groups) <= len(segments) // 2


def test_what_crosses_segments_is_there_for_one_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all segments in one group, what crosses any of them is in memory from the beginning."""
    (step,) = record(lambda x, w: deep(x, w), torch.randn(64, 64), torch.randn(64, 64, requires_grad=True))
    most: list[int] = []
    usual = Adjoint._differentiate

    def differentiate(self: Adjoint, segment: Any) -> None:
        most[-1] = max(most[-1], len(self._kept))
        usual(self, segment)

    monkeypatch.setattr(Adjoint, "_differentiate", differentiate)
    found = []
    for groups in (group_segments, lambda segments: [segments]):
        monkeypatch.setattr(adjoint_module, "group_segments", groups)
        most.append(0)
        found.append(adjoint([step]))
    assert most[0] < most[1]
    assert found[0] == pytest.approx(found[1], rel=0.01)


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = torch.tanh(x @ w)
    return x.square().mean()
