"""Checkpointing inside and around, other saved-tensor hooks, compiled autograd: gradients as eager's, at 8 bits."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gact_fx

X = torch.randn(128, 32, generator=torch.Generator().manual_seed(2))


def save_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "recompute": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, save_products),
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """``checkpointed`` calls each block; ``shared`` has one block for all layers."""

    def __init__(self, checkpointed: Callable[..., Tensor] | None = None, shared: bool = False) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(32, 64), nn.Linear(64, 8)
        block = Block()
        self.blocks = nn.ModuleList([block, block, block] if shared else [block, Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x).tanh()
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else self.checkpointed(block, x)
        return self.outward(x).square().mean()


def errors(
    model: nn.Module,
    compiled: list[nn.Module] | None = None,
    *,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    steps: int = 3,
    **options: Any,
) -> list[float]:
    """Of the gradients of ``model``, of which ``compiled`` (default: all of it) is compiled, step by step."""
    reference = copy.deepcopy(model)
    for part in compiled or [model]:
        gact_fx.compile(part, **{"inner": "eager", "budget_bits": 8, **options})
    found = []
    for _ in range(steps):
        with within():
            call(model, X).backward()
        call(reference, X).backward()
        found.append(relative_error(gradients(model), gradients(reference)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", list(CHECKPOINTS))
def test_checkpointing_inside(how: str) -> None:
    model = Net(CHECKPOINTS[how])
    assert all(1e-5 < error < 0.02 for error in errors(model))
    report, plain = gact_fx.inspect(model), Net()
    errors(plain)
    assert len(report.graphs) == 1 and report.ratio > 3
    # What is in the regions is not held.
    assert report.bytes_after < (1 if how == "selective" else 0.25) * gact_fx.inspect(plain).bytes_after


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_what_checkpointed_blocks_normalise_is_coded(inner: str) -> None:
    """1 / deviation, computed again from codes, would be unbounded in them."""
    model = Net(CHECKPOINTS["recompute"])
    model.blocks[1].norm = nn.RMSNorm(64)
    assert all(1e-5 < error < 0.02 for error in errors(model, inner=inner, steps=2))
    report = gact_fx.inspect(model)
    assert not [row.reason for row in report.rows if "not linear" in row.reason]
    assert report.ratio > 3


@pytest.mark.parametrize("how", list(CHECKPOINTS))
def test_checkpointing_around(how: str) -> None:
    """Backward runs forward again, which must save as it did the first time: also in the step that makes the plan."""
    model = Net()
    # The reentrant one needs an input that requires grad.
    found = errors(model, call=lambda model, x: CHECKPOINTS[how](model, x.clone().requires_grad_()))
    assert all(1e-5 < error < 0.02 for error in found)
    assert gact_fx.inspect(model).ratio > 3


@pytest.mark.parametrize("shared", [False, True])
def test_checkpointing_around_compiled_blocks(shared: bool) -> None:
    model = Net(CHECKPOINTS["recompute"], shared)
    blocks = list(dict.fromkeys(model.blocks))
    assert all(1e-5 < error < 0.02 for error in errors(model, blocks, steps=4, profile_every=2))
    assert all(gact_fx.inspect(block).ratio > 3 for block in blocks)


def test_checkpointing_around_a_graph_break() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.inward(x).tanh())
            torch._dynamo.graph_break()
            return self.outward(self.blocks[1](x)).square().mean()

    model = Broken()
    found = errors(model, call=lambda model, x: CHECKPOINTS["recompute"](model, x), profile_every=2, steps=4)
    assert all(1e-5 < error < 0.02 for error in found)
    assert len(gact_fx.inspect(model).graphs) == 2


def test_profiling_measures_a_checkpointed_model_as_it_does_another() -> None:
    """The run in backward is not taken for another forward pass."""
    plans = []
    for call in (lambda model, x: model(x), lambda model, x: CHECKPOINTS["recompute"](model, x)):
        torch.manual_seed(0)
        model = Net()
        errors(model, call=call, steps=2)
        plans.append(gact_fx.inspect(model).plan)
    assert plans[0] is not None and plans[0] == plans[1]


def copying_hooks() -> AbstractContextManager[Any]:
    """The user's own: every saved tensor as an array of numpy."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True).copy(), torch.from_numpy)


@pytest.mark.parametrize("hooks", [torch.autograd.graph.save_on_cpu, copying_hooks])
def test_other_hooks_get_the_codes(hooks: Callable[[], AbstractContextManager[Any]]) -> None:
    model = Net()
    assert all(1e-5 < error < 0.02 for error in errors(model, within=hooks))
    report = gact_fx.inspect(model)
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.nbytes if x.dtype == torch.uint8 else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(X)
    assert 0.9 * report.bytes_after < sum(sizes) <= report.bytes_after


def compiled_autograd() -> AbstractContextManager[Any]:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))


def test_compiled_autograd_runs_a_plan() -> None:
    model = Net()
    options: dict[str, Any] = {"sample_batches": [(X,)]}
    assert all(1e-5 < error < 0.02 for error in errors(model, within=compiled_autograd, steps=12, **options))
    report = gact_fx.inspect(model)
    assert "no backward pass of these graphs was seen" in report.note
    assert all(row.runs == 1 for row in report.rows) and report.ratio > 3


def test_compiled_autograd_without_a_sample_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level(logging.WARNING, "gact_fx"):
        assert all(1e-5 < error < 0.02 for error in errors(model, within=compiled_autograd, steps=12))
    assert caplog.text.count("compiled autograd runs backward passes itself") == 1
    assert "compiled autograd" in gact_fx.inspect(model).note


def test_compiled_autograd_of_a_compiled_step() -> None:
    """Where forward and backward are compiled as one function, backward goes through the backend once more."""
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())

    def step(x: Tensor) -> None:
        model(x).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = gact_fx.compile(step, inner="eager", budget_bits=8)
        for _ in range(2):
            compiled(X), reference(X).backward()
            assert relative_error(gradients(model), gradients(reference)) < 0.02
