"""Other libraries' training loops and networks; each test runs where its library is installed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from conftest import gradients, relative_error
from torch import Tensor, nn

import gact_fx

BERT = {
    "vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows of 32 tokens; the label says whether there are more ones than twos."""
    tokens = torch.randint(0, 8, (count, 32), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": ((row == 1).sum() > (row == 2).sum()).long()} for row in tokens]


def accuracy(prediction: Any) -> dict[str, float]:
    right = torch.as_tensor(prediction.predictions).argmax(-1) == torch.as_tensor(prediction.label_ids)
    return {"accuracy": right.float().mean().item()}


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    """A Trainer of ``transformers`` for four steps on the CPU."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=16, learning_rate=1e-2, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=rows(128, 1), compute_metrics=accuracy)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_trainer_of_a_compiled_model(options: dict[str, Any], tmp_path: Path) -> None:
    """It trains as uncompressed, evaluates exactly, and what it saves is a model like any other."""
    plain = trainer(bert(), tmp_path, **options)
    plain.train()
    model = gact_fx.compile(bert(), inner="eager", budget_bits=8)
    found = trainer(model, tmp_path, **options)
    found.train()
    assert losses(found) == pytest.approx(losses(plain), rel=0.02 if options else 2e-3)
    report = gact_fx.inspect(model)
    assert report.ratio > 2 and len(report.graphs) == 1

    others = rows(32, 2)
    evaluated = found.evaluate(others)["eval_loss"]
    found.save_model(str(tmp_path / "model"))
    loaded = type(model).from_pretrained(tmp_path / "model")
    assert trainer(loaded, tmp_path, **options).evaluate(others)["eval_loss"] == pytest.approx(evaluated, rel=1e-3)
    assert all(torch.equal(p, loaded.state_dict()[name]) for name, p in model.state_dict().items())


class Tiny(nn.Module):
    """What the Trainer takes for a model: a loss and logits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
def test_trainer_that_compiles_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("gact_fx.accelerate", reason="needs accelerate", exc_type=ImportError)
    torch.manual_seed(0)
    model, reference = Tiny(), Tiny()
    reference.load_state_dict(model.state_dict())
    # One after the other: accelerate has one state for all Trainers.
    plain = trainer(reference, tmp_path)
    plain.train()
    found = trainer(model, tmp_path, torch_compile=True, torch_compile_backend="gact")
    with caplog.at_level("INFO", "gact_fx"):
        found.train()
    assert "planned" in caplog.text
    assert losses(found) == pytest.approx(losses(plain), rel=0.01)
    found.save_model(str(tmp_path / "model"))
    loaded = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_trainer_that_compiles_a_compiled_model(tmp_path: Path) -> None:
    """torch.compile around the model, as ``torch_compile=True`` has it, is no way past the compression."""
    model = gact_fx.compile(bert(), inner="eager")
    trainer(model, tmp_path, torch_compile=True, torch_compile_backend="aot_eager").train()
    report = gact_fx.inspect(model)
    assert report.ratio > 2 and not report.note and len(report.graphs) == 1


def test_accelerate_takes_options() -> None:
    utils = pytest.importorskip("accelerate.utils")
    pytest.importorskip("gact_fx.accelerate", exc_type=ImportError)
    plugin = utils.TorchDynamoPlugin(backend="gact", options={"budget_bits": 2})
    assert plugin.to_kwargs() == {"backend": "gact", "options": {"budget_bits": 2}}
    with pytest.raises(ValueError, match="'GACTT' is not a valid DynamoBackend"):
        utils.TorchDynamoPlugin(backend="gactt")


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """accelerate, which has one state for all of a process, and takes another compiler into a new one alone."""
    found = pytest.importorskip("accelerate")
    found.state.AcceleratorState._reset_state(True)
    yield found
    found.state.AcceleratorState._reset_state(True)


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_accelerator_that_compiles_a_compiled_model(accelerate: Any, by_layer: bool) -> None:
    """As for the Trainer, also where accelerate compiles layer by layer."""
    plugin = accelerate.utils.TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=by_layer)
    model = gact_fx.compile(bert(), inner="eager", budget_bits=8)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
    prepared = accelerator.prepare(model)
    assert prepared is not model
    tokens = torch.randint(0, 8, (16, 32))
    for _ in range(3):
        accelerator.backward(prepared(input_ids=tokens, labels=tokens[:, 0] % 2).loss)
    for found in (model, prepared):
        report = gact_fx.inspect(found)
        assert report.ratio > 2 and not report.note and len(report.graphs) == 1


@pytest.mark.slow
def test_generation_is_that_of_the_model_uncompiled() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    tokens = torch.randint(3, 50, (2, 8))
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    wanted = model.generate(tokens, **options)
    gact_fx.compile(model.train(), inner="eager", sample_batches=[{"input_ids": tokens, "labels": tokens}])
    assert torch.equal(model.eval().generate(tokens, **options), wanted)


def test_a_lightning_module_itself() -> None:
    """Its forward is compiled, which its training step calls; Lightning sees the same LightningModule."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 16)), 64)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Model()
        if compiled:
            gact_fx.compile(model, inner="eager", budget_bits=8)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        fit = lightning.Trainer(max_epochs=2, accelerator="cpu", enable_checkpointing=False, **quiet).fit
        fit(model, data)
        found.append(model.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-2) and gact_fx.inspect(model).ratio > 3


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("gcn", "gat")), "sage", "gin"]
)
def test_graph_nets_have_the_gradients_of_autograd(name: str) -> None:
    data_module = pytest.importorskip("torch_geometric.data")
    example = pytest.importorskip("train_on_cora")
    data = data_module.Data(
        x=torch.rand(200, 40), edge_index=torch.randint(0, 200, (2, 800)), y=torch.randint(0, 7, (200,)),
        train_mask=torch.arange(200) < 150,
    )  # fmt: skip
    model = example.build(name, data, dropout=0.0)
    reference = copy.deepcopy(model)
    gact_fx.compile(model, inner="eager", budget_bits=8)
    for _ in range(2):
        example.step(model, data).backward(), example.step(reference, data).backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.02
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)


@pytest.mark.slow
def test_cora() -> None:
    pytest.importorskip("torch_geometric")
    example = pytest.importorskip("train_on_cora")
    try:
        data = example.cora()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert data.x.shape == (2708, 1433) and int(data.train_mask.sum()) == 140
    model = gact_fx.compile(example.build("gcn", data), inner="eager")
    assert example.train(model, data, epochs=30) > 0.7


def lora(prepare: Callable[[nn.Module], nn.Module] = lambda base: base) -> tuple[Any, dict[str, Tensor]]:
    """A small Llama with adapters whose second halves are not zero any more, as in training.

    ``prepare``: what is done to the Llama before.
    """
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=172, vocab_size=50
    )
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "gate_proj"]
    model = peft.get_peft_model(
        prepare(transformers.LlamaForCausalLM(config)), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(0, 50, (4, 64))
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
def test_lora_of_a_compiled_model(trained: bool) -> None:
    """peft puts its adapters into the model that was compiled, and calls it."""
    tokens = torch.randint(0, 50, (4, 64))

    def compiled(base: nn.Module) -> nn.Module:
        gact_fx.compile(base, inner="eager", budget_bits=8)
        for _ in range(2 if trained else 0):
            base(input_ids=tokens, labels=tokens).loss.backward()
        base.zero_grad()
        return base

    (model, batch), (reference, _) = lora(compiled), lora()
    for _ in range(3):
        model(**batch).loss.backward(), reference(**batch).loss.backward()
        assert 1e-5 < relative_error(gradients(model), gradients(reference)) < 0.02
    report = gact_fx.inspect(model)
    assert report.ratio > 3 and not report.note
    assert any("lora_A" in row.module for row in report.rows)


@pytest.mark.slow
def test_lora(tmp_path: Path) -> None:
    """Frozen weights are held once, by the model; what is saved and merged is what peft saves and merges."""
    model, batch = lora()
    reference = copy.deepcopy(model)
    names = list(model.state_dict())

    def held() -> list[Tensor]:
        return [p for p in model.parameters() if not p.requires_grad]

    frozen = [p.clone() for p in held()]
    gact_fx.compile(model, inner="eager", budget_bits=8)
    for _ in range(2):
        model(**batch).loss.backward(), reference(**batch).loss.backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.02
    report = gact_fx.inspect(model)
    assert report.ratio > 3
    sizes = {tuple(p.shape) for p in frozen if p.dim() == 2}
    weights = [row for row in report.rows if row.shape in sizes or row.shape[::-1] in sizes]
    assert weights and all(row.encoding == "keep" and not row.bytes_after for row in weights)

    assert list(model.state_dict()) == names
    assert all(torch.equal(p, q) for p, q in zip(frozen, held(), strict=True))
    model.save_pretrained(tmp_path / "adapter"), reference.save_pretrained(tmp_path / "wanted")
    files = [(tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("adapter", "wanted")]
    assert files[0] == files[1]
    merged, wanted = model.merge_and_unload(), reference.merge_and_unload()
    assert list(merged.state_dict()) == list(wanted.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, wanted(**batch).logits)
