"""Heads of language models are split: which, and that loss, logits and gradients stay what they were."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import fx, nn
from torch.nn import functional as F

import gact_fx
from gact_fx.graphs import linear_cross_entropy
from gact_fx.graphs.late_product import with_late_products
from gact_fx.passes import find_heads
from gact_fx.passes import split_cross_entropy as module

VOCABULARY = 1000
Loss = Callable[[torch.Tensor, torch.Tensor], Any]
operator = torch.ops.gact_fx.linear_cross_entropy.default


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_heads, "MIN_NUMEL", 2**10)
    monkeypatch.setattr(linear_cross_entropy, "SLAB", 2**12)


class Model(nn.Module):
    """Tokens to logits, and what ``loss`` makes of these."""

    def __init__(self, loss: Loss, bias: bool = False) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32)
        self.head, self.loss = nn.Linear(32, VOCABULARY, bias=bias), loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(F.gelu(self.inner(self.embedding(tokens)))), labels)


def rows(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.float().view(-1, VOCABULARY), labels.view(-1)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*rows(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()))


def with_z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat, target = rows(logits, labels)
    return F.cross_entropy(flat, target) + 1e-2 * torch.logsumexp(flat, dim=-1).square().mean()


def of_each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(*rows(logits, labels), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (8, 16))
    labels = tokens.clone()
    labels[0, :5] = -100
    return tokens, labels


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits / 0.3
    logits = torch.tanh(logits)
    return F.cross_entropy(*rows(logits * 0.3, labels))


def capped_with_z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return with_z_loss(0.5 * logits.float().div(0.5).tanh(), labels)


WEIGHTS = torch.linspace(0.1, 2, VOCABULARY)
BIAS = torch.linspace(-1, 1, VOCABULARY).view(1, -1)
SPLIT: dict[str, Loss] = {
    "mean": lambda z, y: F.cross_entropy(*rows(z, y)),
    "sum": lambda z, y: F.cross_entropy(*rows(z, y), reduction="sum") / 100,
    "of each": of_each,
    "shifted": shifted,
    "reshaped, flattened": lambda z, y: F.cross_entropy(z.reshape(2, 64, VOCABULARY).flatten(0, 1), y.reshape(-1)),
    "slice": lambda z, y: F.cross_entropy(z[:, 2:].flatten(0, 1), y[:, 2:].flatten()),
    "other ignored": lambda z, y: F.cross_entropy(*rows(z, y.clamp(min=0)), ignore_index=0),
    "smoothing": lambda z, y: F.cross_entropy(*rows(z, y), label_smoothing=0.1),
    "weights": lambda z, y: F.cross_entropy(*rows(z, y), WEIGHTS),
    "weights and smoothing": lambda z, y: F.cross_entropy(*rows(z, y), WEIGHTS, label_smoothing=0.1),
    "z-loss": with_z_loss,
    "scaled": lambda z, y: F.cross_entropy(*rows(z * 0.5, y)),
    "scaled twice": lambda z, y: F.cross_entropy(*rows(3.0 * (z / 8), y)),
    "capped": capped,
    "capped, with a z-loss": capped_with_z_loss,
    "capped, with smoothing": lambda z, y: F.cross_entropy(*rows(2 * torch.tanh(3 * z), y), label_smoothing=0.1),
}
# A linear layer without a bias of its own.
BIASED: dict[str, Loss] = {
    "bias": lambda z, y: F.cross_entropy(*rows(z + BIAS, y)),
    "bias, scaled": lambda z, y: F.cross_entropy(*rows((z + BIAS) / 2, y)),
    "bias, capped": lambda z, y: capped(z + BIAS, y),
}


def masked_in_place(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits[..., 500:] = -1e9
    return F.cross_entropy(*rows(logits, labels.clamp(max=499)))


def scaled_in_place(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits.mul_(0.1)
    return F.cross_entropy(*rows(logits, labels))


def written_through_a_view(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits.view(-1, VOCABULARY)
    flat.div_(10)
    return F.cross_entropy(flat, labels.view(-1))


def written_behind(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat, target = rows(logits, labels)
    loss = F.cross_entropy(flat, target)
    flat.mul_(2)
    return loss + flat.logsumexp(-1).mean()


def viewed_without_a_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        flat = logits.float().view(-1, VOCABULARY)
    return F.cross_entropy(flat, labels.view(-1)) + logits.mean()


def a_metric_and_a_z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat, target = rows(logits, labels)
    with torch.no_grad():
        metric = F.cross_entropy(flat, target)
    return flat.logsumexp(-1).square().mean() + metric


def weighed_without_a_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat, target = rows(logits, labels)
    losses = F.cross_entropy(flat, target, reduction="none")
    with torch.no_grad():
        weights = torch.logsumexp(input=flat, dim=-1)
        others = torch.logsumexp(flat, -1)
    return (losses * (weights + others)).mean()


# What is split, though the logits are read by others.
READ: dict[str, Loss] = {"weighed without a gradient": weighed_without_a_gradient}
WHOLE: dict[str, Loss] = {
    "scaled behind a view": lambda z, y: F.cross_entropy(rows(z, y)[0] * 0.5, y.view(-1)),
    "scaled by a tensor": lambda z, y: F.cross_entropy(*rows(z * BIAS, y)),
    "bias behind a factor": lambda z, y: F.cross_entropy(*rows(2 * z + BIAS, y)),
    "bias of each row": lambda z, y: F.cross_entropy(*rows(z + BIAS.view(-1)[:16, None], y)),
    "capped twice": lambda z, y: F.cross_entropy(*rows(z.tanh().tanh(), y)),
    "over logits": lambda z, y: F.cross_entropy(*rows(1 / (z + 9), y)),
    "half of the classes": lambda z, y: F.cross_entropy(z[..., :500].reshape(-1, 500), y.view(-1) % 500),
    "probabilities": lambda z, y: F.cross_entropy(rows(z, y)[0], torch.full((128, VOCABULARY), 1e-3)),
    "classes come second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "without a gradient": lambda z, y: F.cross_entropy(*rows(z.detach(), y)) + z.mean(),
    "in another precision": lambda z, y: F.cross_entropy(z.double().view(-1, VOCABULARY), y.view(-1)),
    "masked in place": masked_in_place,
    "scaled in place": scaled_in_place,
    "written through a view": written_through_a_view,
    "written behind": written_behind,
    "viewed without a gradient": viewed_without_a_gradient,
    "a metric and a z-loss": a_metric_and_a_z_loss,
}


class Watched:
    """A backend that splits, and runs what it gets call by call."""

    def __init__(self, *, loss_only: bool = False) -> None:
        self.calls = 0
        self.linear = 0
        self._loss_only = loss_only

    def __call__(self, graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        late = module.split_cross_entropy(graph, loss_only=self._loss_only)
        self.calls += len(graph.graph.find_nodes(op="call_function", target=operator))
        self.linear += len(graph.graph.find_nodes(op="call_function", target=F.linear))
        return with_late_products(graph, late)


def pair(loss: Loss, bias: bool = False) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model(loss, bias)
    return model, copy.deepcopy(model)


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def trained_alike(model: nn.Module, reference: nn.Module) -> Watched:
    """Differentiate a batch both ways and compare; what the backend saw."""
    watched, given = Watched(), batch()
    torch.compile(model, backend=watched)(*given).backward()
    reference(*given).backward()
    assert relative_error(trained(model), trained(reference)) < 1e-6
    return watched


@pytest.mark.parametrize(
    ("name", "bias"), [*((name, bias) for name in SPLIT for bias in (False, True)), *((name, False) for name in BIASED)]
)
def test_losses_that_are_split(name: str, bias: bool) -> None:
    model, reference = pair({**SPLIT, **BIASED}[name], bias)
    watched, given = Watched(), batch()
    found, exact = torch.compile(model, backend=watched)(*given), reference(*given)
    # The logits are computed nowhere else.
    assert watched.calls == 1 and watched.linear == 1
    assert found.dtype == exact.dtype
    torch.testing.assert_close(found, exact)
    found.backward()
    exact.backward()
    assert relative_error(gradients(model), gradients(reference)) < 1e-6


@pytest.mark.parametrize("name", WHOLE)
def test_losses_that_are_not(name: str) -> None:
    model, reference = pair(WHOLE[name])
    watched = trained_alike(model, reference)
    assert watched.calls == 0


def test_few_logits_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_heads, "MIN_NUMEL", 128 * VOCABULARY + 1)
    watched = Watched()
    torch.compile(pair(SPLIT["mean"])[0], backend=watched)(*batch())
    assert watched.calls == 0


# What is made of the linear layer's result before it is returned, and read by the loss.
RETURNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda z: z,
    "scaled": lambda z: z / 3,
    "capped": lambda z: 0.5 * torch.tanh(2 * z),
    "biased": lambda z: z + BIAS,
}


@pytest.mark.parametrize("reads", ["loss", "logits", "both", "in place"])
@pytest.mark.parametrize(
    ("how", "bias"), [(how, bias) for how in RETURNED for bias in (False, True) if how != "biased" or not bias]
)
def test_logits_that_are_returned_have_a_gradient_for_whoever_asks(how: str, bias: bool, reads: str) -> None:
    def loss_and_logits(z: torch.Tensor, y: torch.Tensor) -> Any:
        logits = RETURNED[how](z)
        return SPLIT["mean"](logits, y), logits

    model, reference = pair(loss_and_logits, bias)
    watched, given = Watched(), batch()
    for network in (torch.compile(model, backend=watched), reference):
        loss, logits = network(*given)
        assert logits.requires_grad
        if reads == "in place":
            logits.mul_(0.5)
        wanted = {"loss": loss, "logits": logits.sin().mean()}
        wanted["both"] = wanted["in place"] = wanted["loss"] + wanted["logits"]
        wanted[reads].backward()
    assert watched.calls == 1
    assert relative_error(trained(model), trained(reference)) < 1e-6


@pytest.mark.parametrize("name", READ)
def test_losses_that_are_split_beside_other_readers(name: str) -> None:
    model, reference = pair(READ[name])
    watched = trained_alike(model, reference)
    assert watched.calls == 1 and watched.linear == 2


class HiddenWritten(Model):
    """What the head read is written to before the loss."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(tokens))
        logits = F.linear(hidden, self.head.weight.detach())
        hidden.mul_(0.1)
        return F.cross_entropy(*rows(logits, labels)) + hidden.mean()


class Contrastive(Model):
    """The weight of the linear layer is an activation."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        return F.cross_entropy(F.linear(hidden, self.inner(hidden)), torch.arange(len(hidden)))


@pytest.mark.parametrize("kind", [HiddenWritten, Contrastive])
def test_heads_that_are_none(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind(SPLIT["mean"])
    reference = copy.deepcopy(model)
    watched = trained_alike(model, reference)
    assert watched.calls == 0


@pytest.mark.parametrize("reads", ["size", "slice"])
def test_sizes_that_vary(reads: str) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        rows_, columns, classes = logits.shape
        if reads == "slice":
            logits, labels, columns = logits[:, : columns - 1], labels[:, : columns - 1], columns - 1
        return F.cross_entropy(logits.reshape(rows_ * columns, classes), labels.reshape(rows_ * columns)), logits

    model, reference = pair(loss)
    watched = Watched()
    compiled = torch.compile(model, backend=watched, dynamic=True)
    for size in ((8, 16), (4, 12)):
        tokens = torch.randint(0, VOCABULARY, size)
        model.zero_grad()
        reference.zero_grad()
        for network in (compiled, reference):
            found, logits = network(tokens, tokens)
            (found + logits.sin().mean()).backward()
        assert relative_error(gradients(model), gradients(reference)) < 1e-6
    assert watched.calls > 0


def test_inside_a_transform_nothing_is_split() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat, target = rows(logits, labels)
        ones = torch.ones(VOCABULARY, 32)
        inner = torch.func.grad(lambda w: F.cross_entropy(F.linear(flat.detach()[:, :32], w), target))(ones)
        return F.cross_entropy(flat, target) + inner.square().sum()

    model, reference = pair(loss)
    watched = trained_alike(model, reference)
    assert watched.calls == 0


def test_logits_that_are_read_in_the_graph() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return SPLIT["mean"](logits, labels) + logits.square().mean(), logits.argmax(-1)

    model, reference = pair(loss)
    watched, given = Watched(), batch()
    found, exact = torch.compile(model, backend=watched)(*given), reference(*given)
    assert watched.calls == 1 and watched.linear == 2 and found[1].equal(exact[1])
    found[0].backward()
    exact[0].backward()
    assert relative_error(gradients(model), gradients(reference)) < 1e-6


def test_under_autocast_no_weight_is_cast_whole() -> None:
    model, reference = pair(SPLIT["mean"], bias=True)
    seen: list[fx.Graph] = []
    watched, given = Watched(), batch()

    def backend(graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        run = watched(graph, inputs)
        seen.append(graph.graph)
        return run

    for network in (torch.compile(model, backend=backend), reference):
        with torch.autocast("cpu", torch.bfloat16):
            network(*given).backward()
    (call,) = seen[0].find_nodes(op="call_function", target=operator)
    assert [node.op for node in call.args[1:3]] == ["placeholder", "placeholder"]
    assert relative_error(gradients(model), gradients(reference)) < 1e-2


def test_weights_of_16_bits_are_summed_in_32() -> None:
    """The mean of many rows divides by the sum of their weights, which autocast has in float32."""
    weights = WEIGHTS.bfloat16()
    model, reference = pair(lambda z, y: F.cross_entropy(*rows(z, y), weights))
    watched, (tokens, labels) = Watched(), batch()
    given = tokens.repeat(100, 1), labels.repeat(100, 1)
    losses = []
    for network in (torch.compile(model, backend=watched), reference):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(network(*given).detach())
    assert watched.calls == 1 and losses[0].dtype == losses[1].dtype
    assert relative_error(losses[:1], losses[1:]) < 1e-4


@pytest.mark.parametrize("how", RETURNED)
def test_whoever_reads_the_loss_alone_gets_no_logits(how: str) -> None:
    def loss_and_logits(z: torch.Tensor, y: torch.Tensor) -> Any:
        logits = RETURNED[how](z)
        return SPLIT["mean"](logits, y), logits

    model, reference = pair(loss_and_logits)
    watched, given = Watched(loss_only=True), batch()
    loss, logits = torch.compile(model, backend=watched)(*given)
    assert watched.calls == 1 and watched.linear == 1
    assert logits.shape == (8, 16, VOCABULARY) and bool(logits.isnan().all()) and not logits.requires_grad
    assert logits.untyped_storage().nbytes() == 8 * 16 * 4
    loss.backward()
    reference(*given)[0].backward()
    assert relative_error(gradients(model), gradients(reference)) < 1e-6


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_training_with_logits_returned(inner: str, amp: bool) -> None:
    model, reference = pair(lambda z, y: (SPLIT["mean"](z, y), z))
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=64)
    given = batch()
    for _ in range(2):
        for network in (model, reference):
            network.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
                loss, logits = network(*given)
            (loss + logits.float().square().mean()).backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.01


def test_without_the_option_nothing_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_split", None)
    model, reference = pair(SPLIT["mean"])
    gact_fx.compile(model, budget_bits=8, inner="eager", min_elements=64, split_loss=False)
    given = batch()
    for network in (model, reference):
        network(*given).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.02


_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2}
_WIDE = {**_SIZES, "hidden_size": 32, "intermediate_size": 64}
_CAUSAL = {**_WIDE, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Those of a vocabulary with a bias that is a buffer, with a cap, and with factors among them.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "LlamaForCausalLM": _WIDE,
    "BertForMaskedLM": {**_WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "dropout_rate": 0.0,
        "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        **_SIZES, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
    },
    "Gemma2ForCausalLM": {**_CAUSAL, "head_dim": 16, "final_logit_softcapping": 0.1},
    "CohereForCausalLM": {**_CAUSAL, "logit_scale": 0.25},
    "GraniteForCausalLM": {**_CAUSAL, "logits_scaling": 4.0},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name]))
    calls = []
    split = module._split
    monkeypatch.setattr(module, "_split", lambda *args: calls.append(args) or split(*args))  # type: ignore[func-returns-value]
    reference = copy.deepcopy(model.train())
    gact_fx.compile(model, budget_bits=8, inner="eager")
    tokens = torch.randint(3, VOCABULARY, (4, 32))
    for _ in range(2):
        for network in (model, reference):
            network.zero_grad()
            found = network(input_ids=tokens, labels=tokens)
            found.loss.backward()
        assert (
            relative_error(*([p.grad for p in n.parameters() if p.grad is not None] for n in (model, reference))) < 0.02
        )
    # Once to profile, once by the plan.
    assert len(calls) == 2
