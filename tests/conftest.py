"""Shared fixtures: traced graph pairs, and a fresh compiler for every test. The tiers are told in the Makefile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import distributed as dist
from torch import fx, nn

from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.graphs.compilers import compile_pair
from gact_fx.passes import PIPELINE
from gact_fx.passes.encodings import Encoding, Mask, Quantize
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.pipeline import Context, Pass, run_passes
from gact_fx.plan import GraphPlan

Trace = Callable[..., GraphPair]

# How many examples a property is tried on is the tier's: ``--hypothesis-profile=whole`` is `make test-all`. The same
# ones every time, so that a failure can be had again.
settings.register_profile(
    "fast", max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
settings.register_profile("sanitized", settings.get_profile("fast"), max_examples=400)
settings.register_profile("whole", settings.get_profile("fast"), max_examples=10_000)
settings.load_profile("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test of both inner compilers the fast tier has the eager one, unless it is marked ``both_compilers``."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("inner") == "inductor" and item.get_closest_marker("both_compilers") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def trace() -> Trace:
    """``trace(model, *inputs)``: the graph pair of a model's training step, as the passes get it.

    The cut is torch.compile's own unless ``recompute`` says otherwise; where ``marked`` is false, what comes from
    parameters alone may be saved, too.
    """

    def run(
        model: Callable[..., Any],
        *inputs: torch.Tensor,
        upstream: bool = False,
        inner: str = "eager",
        recompute: str = "off",
        marked: bool = True,
        budget_bytes: int | None = None,
    ) -> GraphPair:
        found: list[GraphPair] = []

        def cut(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            graph = JointGraph(joint, joint_inputs, lambda index: upstream, **options)
            context = Context(Config(recompute=recompute, budget_bytes=budget_bytes), joint=graph)
            names = ("copy_mutated_inputs", *(["mark_recomputation"] if marked else []), "partition")
            pair = run_passes(passes(*names), context).pair
            assert pair is not None
            found.append(pair)
            return pair.forward, pair.backward

        def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            return compile_pair(module, example_inputs, cut, inner=inner)

        torch.compile(wrapped(model), backend=backend)(*inputs)
        return found[-1]

    return run


def wrapped(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function around ``model``: Dynamo does not compile frames of torch.nn themselves."""
    return lambda *inputs: model(*inputs)


def analyze(pair: GraphPair, min_elements: int = 64) -> GraphAnalysis:
    names = ("recompute_attention", "expose_decisions", "find_saved_tensors", "decide_eligibility")
    return run_passes(passes(*names), Context(Config(min_elements=min_elements), pair=pair)).analysis


def passes(*names: str) -> list[Pass]:
    """Those passes of the pipeline, in its order."""
    return [each for each in PIPELINE if each.name in names]


def run_pass(name: str, pair: GraphPair, **config: Any) -> Context:
    """Run one pass over ``pair``."""
    return run_passes(passes(name), Context(Config(**config), pair=pair))


def insert(pair: GraphPair, analysis: GraphAnalysis, plan: GraphPlan) -> None:
    """Store what ``plan`` says: `insert_compression`, and what makes backward read it."""
    context = Context(Config(), find_plan=lambda found: plan, pair=pair, saved=analysis.saved, analysis=analysis)
    run_passes(passes("find_plan", "insert_compression", "read_masks", "read_values"), context)


def masks_of(how: Encoding) -> tuple[str, ...]:
    """The masks that travel in the blob of a saved tensor."""
    return how.masks if isinstance(how, (Mask, Quantize)) else ()


def decisions(analysis: GraphAnalysis) -> dict[str, Encoding]:
    return {how.name: how for how in analysis.encodings}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters' gradients, which are then cleared."""
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def relative_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in exact)) ** 0.5


class Mixed(nn.Module):
    """Convolution, batch norm, ReLU, attention, layer norm, GELU: one of each kind of saved tensor."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + (q @ k.transpose(1, 2) / 4).softmax(-1) @ v
        x = x + self.mlp(self.norm(x))
        return nn.functional.cross_entropy(self.head(x.mean(1)), y)


def mixed_batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(0, 10, (rows,), generator=generator)
