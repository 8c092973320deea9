"""The callbacks for other libraries' training loops; each test runs where its library is installed."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gact_fx
from gact_fx import integrations
from gact_fx.training.model import session_of

OPTIONS: dict[str, Any] = {"inner": "eager", "min_elements": 64, "budget_bits": 3}
STEPS, SAVED = 6, 3


class Killed(Exception):
    """Stands for the end of a process."""


class Tiny(nn.Module):
    """What both loops take for a model: a loss, by name, of rows of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(rows)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(96, 8, generator=generator)
    return [{"rows": row, "labels": (row.sum() > 0).long()} for row in found]


def plan_of(model: nn.Module) -> gact_fx.Plan:
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    return plan


# Hugging Face's Trainer


def hugging_face(model: nn.Module, folder: Path, *callbacks: Any, steps: int = STEPS) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=16, learning_rate=1e-2, report_to=[],
        logging_steps=1, save_steps=SAVED, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=list(callbacks))


def losses(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def figures(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "gact_fx/bytes_after" in entry]


def killer(at: int) -> Any:
    transformers = pytest.importorskip("transformers")

    class Killer(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == at:
                raise Killed

    return Killer()


def test_trainer_killed_and_resumed_trains_as_if_it_had_not_been(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole = hugging_face(Tiny(), tmp_path / "whole", integrations.GactTrainerCallback(**OPTIONS))
    whole.train()
    plan = plan_of(whole.model)

    callback = integrations.GactTrainerCallback(**OPTIONS)
    with pytest.raises(Killed):
        hugging_face(Tiny(), tmp_path / "killed", callback, killer(SAVED + 2)).train()
    checkpoint = tmp_path / "killed" / f"checkpoint-{SAVED}"
    assert gact_fx.Plan.load(checkpoint / "gact_fx_plan.json") == plan

    again = hugging_face(Tiny(), tmp_path / "killed", integrations.GactTrainerCallback(**OPTIONS))
    again.train(resume_from_checkpoint=True)
    assert plan_of(again.model) == plan
    assert losses(again) == losses(whole) and len(losses(again)) == STEPS
    assert all(torch.equal(p, q) for p, q in zip(again.model.parameters(), whole.model.parameters(), strict=True))
    # Without the plan of the checkpoint, its first step would be a sample, at 8 bits.
    other = hugging_face(Tiny(), tmp_path / "killed")
    gact_fx.compile(other.model, **OPTIONS)
    other.train(resume_from_checkpoint=str(checkpoint))
    assert losses(other) != losses(whole)


def test_trainer_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = hugging_face(Tiny(), tmp_path, integrations.GactTrainerCallback(**OPTIONS), steps=3)
    trainer.train()
    (entry,) = figures(trainer)
    report = gact_fx.inspect(trainer.model)
    assert (entry["gact_fx/bytes_before"], entry["gact_fx/bytes_after"]) == (report.bytes_before, report.bytes_after)
    assert report.plan is not None and entry["gact_fx/noise_variance"] == report.plan.variance
    assert entry["gact_fx/plan_step"] == 1 and entry["step"] == 2 and "loss" in entry


def test_trainer_logs_the_figures_of_sample_batches_where_it_is_asked_to(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = hugging_face(Tiny(), tmp_path, steps=2)
    batches = [{name: torch.stack([row[name] for row in rows()[:16]]) for name in ("rows", "labels")}] * 2
    batches = [{name: value[i:] for name, value in batch.items()} for i, batch in enumerate(batches)]
    callback = integrations.GactTrainerCallback(
        log=trainer.log, sample_batches=batches, loss_fn=lambda model, batch: model(**batch)["loss"], **OPTIONS
    )
    trainer.add_callback(callback)
    trainer.train()
    (entry,) = figures(trainer)
    plan = plan_of(trainer.model)
    assert plan.variance is not None and plan.minibatch_variance
    assert entry["gact_fx/noise"] == plan.variance / plan.minibatch_variance
    assert entry["gact_fx/plan_step"] == 0 and "loss" not in entry


def test_trainer_of_a_compiled_model_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    model = gact_fx.compile(Tiny(), **OPTIONS)
    session = session_of(model)
    hugging_face(model, tmp_path, integrations.GactTrainerCallback(budget_bits=8), steps=SAVED).train()
    assert session_of(model) is session and plan_of(model).budget_bits == 3
    # And one that is compiled anew takes the checkpoint's plan.
    again = gact_fx.compile(Tiny(), **OPTIONS)
    trainer = hugging_face(again, tmp_path, integrations.GactTrainerCallback())
    trainer.train(resume_from_checkpoint=True)
    assert plan_of(again) == plan_of(model)
    assert figures(trainer)[-1]["gact_fx/plan_step"] == 1
    # Other bits than the checkpoint's are not taken in silence.
    with caplog.at_level(logging.WARNING, "gact_fx"):
        callback = integrations.GactTrainerCallback(**{**OPTIONS, "budget_bits": 5})
        hugging_face(Tiny(), tmp_path, callback).train(resume_from_checkpoint=True)
    assert "made for budget_bits=3; budget_bits=5 does nothing" in caplog.text


def test_trainer_without_a_plan_in_the_checkpoint_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    hugging_face(Tiny(), tmp_path, steps=SAVED).train()
    trainer = hugging_face(Tiny(), tmp_path, integrations.GactTrainerCallback(**OPTIONS))
    with caplog.at_level(logging.WARNING, "gact_fx"):
        trainer.train(resume_from_checkpoint=True)
    assert f"resumed at step {SAVED}, and {tmp_path / f'checkpoint-{SAVED}'} has no gact_fx_plan.json" in caplog.text
    assert figures(trainer)[0]["gact_fx/plan_step"] == SAVED + 1


# Lightning


def lightning_module(with_forward: bool = True) -> Any:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = Tiny()
            self.losses: dict[int, float] = {}
            self.kills_at: int | None = None

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            if self.kills_at == self.global_step:
                raise Killed
            loss: Tensor = (self if with_forward else self.network)(**batch)["loss"]
            self.losses[self.global_step] = loss.item()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    if with_forward:
        Model.forward = lambda self, **batch: self.network(**batch)
    return Model()


def fit(model: Any, *callbacks: Any, checkpoint: Path | None = None, **options: Any) -> Any:
    """Two epochs of three steps."""
    lightning = pytest.importorskip("lightning")
    options = {"logger": False, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(rows()[:48], 16)  # type: ignore[arg-type, var-annotated]
    trainer.fit(model, data, ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("with_forward", [True, False], ids=["itself", "its network"])
def test_lightning_killed_and_resumed_trains_as_if_it_had_not_been(with_forward: bool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    whole = lightning_module(with_forward)
    fit(whole, integrations.GactLightningCallback(**OPTIONS))
    plan = plan_of(whole)

    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(tmp_path, filename="half", save_top_k=-1, every_n_epochs=1, enable_version_counter=False)
    model = lightning_module(with_forward)
    model.kills_at = SAVED + 1
    with pytest.raises(Killed):
        fit(model, integrations.GactLightningCallback(**OPTIONS), saver, enable_checkpointing=True)

    again = lightning_module(with_forward)
    fit(again, integrations.GactLightningCallback(**OPTIONS), checkpoint=tmp_path / "half.ckpt")
    assert plan_of(again) == plan
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step >= SAVED}
    assert len(whole.losses) == STEPS
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), whole.parameters(), strict=True))
    # A checkpoint without a plan: the first step is a sample.
    state = torch.load(tmp_path / "half.ckpt", weights_only=False)
    state["callbacks"] = {}
    torch.save(state, tmp_path / "bare.ckpt")
    other = lightning_module(with_forward)
    fit(other, integrations.GactLightningCallback(**OPTIONS), checkpoint=tmp_path / "bare.ckpt")
    assert other.losses != again.losses


def test_lightning_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    model, logger = lightning_module(), CSVLogger(tmp_path)
    fit(model, integrations.GactLightningCallback(**OPTIONS), logger=logger)
    (entry,) = [entry for entry in logger.experiment.metrics if "gact_fx/bytes_after" in entry] or _read(logger)
    report = gact_fx.inspect(model)
    assert float(entry["gact_fx/bytes_after"]) == report.bytes_after
    assert float(entry["gact_fx/bytes_before"]) == report.bytes_before
    assert report.plan is not None and float(entry["gact_fx/noise_variance"]) == pytest.approx(report.plan.variance)
    assert (float(entry["gact_fx/plan_step"]), int(entry["step"])) == (1, 2)


def _read(logger: Any) -> list[dict[str, str]]:
    import csv

    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return [entry for entry in csv.DictReader(file) if entry["gact_fx/bytes_after"]]


def test_lightning_names_the_module_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lightning")
    model = lightning_module(with_forward=False)
    model.other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has no forward, and 2 modules .* \(network, other\); give"):
        fit(model, integrations.GactLightningCallback(**OPTIONS))
    with pytest.raises(ValueError, match="has no module='net'; it has network, other"):
        fit(model, integrations.GactLightningCallback(module="net", **OPTIONS))
    with caplog.at_level(logging.WARNING, "gact_fx"):
        fit(model, integrations.GactLightningCallback(module="other", **OPTIONS))
    assert caplog.text.count("has not called the module that was compiled (other)") == 1
    gact_fx.uncompile(model)
    fit(model, integrations.GactLightningCallback(module="network", **OPTIONS))
    assert gact_fx.inspect(model.network).ratio > 2


# Both


@pytest.mark.parametrize("name", ["GactTrainerCallback", "GactLightningCallback"])
def test_options_are_checked_when_they_are_given(name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    callback = getattr(integrations, name)
    for options, message in (
        ({"budget_bit": 4}, r"unknown option 'budget_bit'; did you mean 'budget_bits'\?"),
        ({"budget_bits": 0}, "budget_bits must lie in"),
        ({"budget_bits": 4, "budget_bytes": 10}, "leave one out"),
        ({"loss_fn": len}, "loss_fn is for sample_batches"),
    ):
        with pytest.raises(ValueError, match=message):
            callback(**options)


def test_what_is_missing_is_named() -> None:
    """And nothing is imported before it is needed."""
    program = """
import sys
for name in ("transformers", "lightning", "pytorch_lightning"):
    assert name not in sys.modules
    sys.modules[name] = None
import gact_fx
from gact_fx import integrations
for name, extra in (("GactTrainerCallback", "transformers"), ("GactLightningCallback", "lightning")):
    try:
        getattr(integrations, name)
    except ImportError as error:
        assert isinstance(error, gact_fx.GactError) and f"pip install 'gact-fx[{extra}]'" in str(error), error
    else:
        raise AssertionError(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
