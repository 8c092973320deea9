"""``loss_only=True``: what it changes, what it does not, and where the Trainer reads logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from peak_bytes import peak_bytes
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx
from gact_fx import integrations
from gact_fx.graphs import linear_cross_entropy
from gact_fx.passes import find_heads

VOCABULARY = 1000
OPTIONS: dict[str, Any] = {"inner": "eager", "min_elements": 64, "budget_bits": 8}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_heads, "MIN_NUMEL", 2**10)


class Model(nn.Module):
    """What the Trainer takes for a language model: it computes its loss where it is given labels."""

    config = None  # The Trainer asks for its fields.

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Tanh())
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.inner(self.embedding(input_ids)))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))}
        return {**loss, "logits": logits}


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def step(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    found: dict[str, Tensor] = model(**batch())
    found["loss"].backward()
    return found


def compiled(**options: Any) -> nn.Module:
    """The model, having trained for a step; the next one runs by its plan, if it has any."""
    model = gact_fx.compile(Model(), **{**OPTIONS, **options})
    step(model)
    return model


@pytest.mark.parametrize(("smallest", "bound"), [(2**20, 1e-6), (64, 0.01)], ids=["exact", "codes"])
def test_loss_and_gradients_are_those_of_the_whole_logits(smallest: int, bound: float) -> None:
    """Where no tensor is large enough for codes, all that differs is rounding."""
    alone, whole = (compiled(min_elements=smallest, loss_only=loss_only) for loss_only in (True, False))
    exact = Model()
    outputs = [step(model) for model in (alone, whole, exact)]
    assert [bool(output["logits"].isnan().all()) for output in outputs] == [True, False, False]
    losses = [output["loss"].item() for output in outputs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] == pytest.approx(losses[2], rel=1e-6)
    rows = gact_fx.inspect(alone).rows
    assert any(row.encoding == "quantize" for row in rows) == (smallest == 64)
    found, others = gradients(alone), [gradients(whole), gradients(exact)]
    assert all(relative_error(found, other) < bound for other in others)


def test_logits_are_nan_in_training_and_real_without_gradients() -> None:
    model, exact = compiled(loss_only=True), Model()
    wanted = exact(**batch())["logits"]
    for is_training in (True, False, True):
        model.train(is_training)
        logits = step(model)["logits"]
        assert logits.shape == wanted.shape and bool(logits.isnan().all()) and not logits.requires_grad
        assert logits.untyped_storage().nbytes() == 8 * 16 * 4
        for without_gradients in (torch.no_grad, torch.inference_mode):
            with without_gradients():
                torch.testing.assert_close(model(**batch())["logits"], wanted)
    # Where the model computes no loss there is nothing to split.
    torch.testing.assert_close(model(batch()["input_ids"])["logits"], wanted)


# Hugging Face's Trainer


def trainer(folder: Path, *callbacks: Any, model: nn.Module | None = None, smoothing: float = 0.0, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=8, report_to=[], logging_steps=1, save_strategy="no",
        disable_tqdm=True, use_cpu=True, label_smoothing_factor=smoothing,
    )  # fmt: skip
    rows = [{name: value[i] for name, value in batch().items()} for i in range(8)]
    network = Model() if model is None else model
    return transformers.Trainer(
        network, arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks), **more
    )


def callback(**options: Any) -> Any:
    pytest.importorskip("transformers")
    return integrations.GactTrainerCallback(**OPTIONS, **options)


def test_the_trainer_reads_the_loss_alone_and_metrics_read_real_logits(tmp_path: Path) -> None:
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(torch.tensor(prediction.predictions))
        return {}

    found = trainer(tmp_path, callback(loss_only=True), compute_metrics=metrics)
    found.train()
    assert all(entry["loss"] < 8 for entry in found.state.log_history if "loss" in entry)
    assert bool(step(found.model)["logits"].isnan().all())
    assert found.evaluate()["eval_loss"] < 8 and seen and all(bool(logits.isfinite().all()) for logits in seen)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_label_smoothing_of_the_trainer_is_refused(is_compiled: bool, tmp_path: Path) -> None:
    """Its loss is that of the logits, which are then neither split nor NaN: the option would save nothing."""
    model = gact_fx.compile(Model(), **OPTIONS, loss_only=True) if is_compiled else Model()
    refusing = trainer(tmp_path, callback(loss_only=not is_compiled), model=model, smoothing=0.1)
    with pytest.raises(gact_fx.errors.UsageError, match=r"loss_only=True .* got label_smoothing_factor=0.1; leave"):
        refusing.train()
    trainer(tmp_path, callback(), smoothing=0.1).train()


def test_a_loss_function_of_the_trainer_gets_real_logits(tmp_path: Path) -> None:
    """The Trainer then keeps the labels to itself; a callback does not see that there is such a function."""
    seen = []

    def loss(outputs: dict[str, Tensor], labels: Tensor, **options: Any) -> Tensor:
        seen.append(bool(outputs["logits"].isfinite().all()))
        return F.cross_entropy(outputs["logits"].view(-1, VOCABULARY), labels.view(-1))

    trainer(tmp_path, callback(loss_only=True), compute_loss_func=loss).train()
    assert seen == [True] * 3


# What is in memory


def language_model() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small GPT-2 of 8192 words: its logits take more than everything else."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=8192, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 8192, (4, 128), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("loss_only", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_that_a_step_returns_are_one_tensor(loss_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither copied nor saved for backward; with ``loss_only`` they are never there whole."""
    monkeypatch.setattr(find_heads, "MIN_NUMEL", 2**20)
    monkeypatch.setattr(linear_cross_entropy, "SLAB", 2**18)
    model, given = language_model()
    gact_fx.compile(model, inner="inductor", loss_only=loss_only)
    outputs: list[Any] = []

    def loss() -> Tensor:
        outputs.append(model(**given))
        return outputs[-1].loss

    for _ in range(3):
        loss().backward()
    outputs.clear()
    model.zero_grad(set_to_none=True)
    found = peak_bytes(loss)
    logits, codes = outputs[0].logits, gact_fx.inspect(model).bytes_after
    whole = logits.numel() * logits.element_size()
    assert logits.dtype == torch.float32
    there = 0 if loss_only else whole
    assert logits.untyped_storage().nbytes() <= (0.01 * whole if loss_only else whole)
    assert there + codes <= found.held < there + codes + 0.02 * whole
    # The slabs are part of the peak that the report predicts; logits that the caller keeps are not.
    assert not loss_only or gact_fx.inspect(model).peak_predicted == pytest.approx(found.step, rel=0.03)
    # A copy would be 1; slabs of them were 0.13.
    assert found.forward < there + 0.5 * whole and found.backward < found.left + 0.5 * whole
