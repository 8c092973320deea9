"""Training on a GPU, as people train: the gradients of eager PyTorch, few bytes held, and a peak that is kept.

Without a GPU the quick ones rehearse themselves on the CPU, whose training other files test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import relative_error
from random_programs import judge_program, steps_of, text
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
IMAGES, TEXTS, TOKENS, VOCABULARY = (32, 8, 128, 2048) if ON_GPU else (16, 4, 32, 256)
pytestmark = [pytest.mark.cuda]
on_gpu = pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
INNER = pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=on_gpu)])


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """TF32 would round an eager convolution more than 8 bits do."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


class Convolutions(nn.Module):
    """Batch norm, ReLU, max pooling, a residual and GELU: what vision networks are made of."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.inner, self.again = nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.drop, self.head = nn.Dropout(rate), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        hidden = hidden + self.drop(F.gelu(self.again(self.inner(hidden))))
        return self.head(hidden.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, rate: float, spelled_out: bool) -> None:
        super().__init__()
        self.width, self.rate, self.spelled_out = width, rate, spelled_out
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = self.rate if self.training else 0.0
        if not self.spelled_out:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(q.dtype)
        return F.dropout(scores, rate) @ v

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.behind(x))))


class Language(nn.Module):
    """A decoder with its loss; attention by PyTorch's operator, or ``spelled_out``."""

    def __init__(self, rate: float = 0.0, spelled_out: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 128)
        self.blocks = nn.ModuleList(Block(128, rate, spelled_out) for _ in range(2))
        self.head = nn.Linear(128, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


Case = tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]


def build(name: str, rate: float = 0.0) -> Case:
    """A network and its batch on the device, and the loss."""
    if name == "convolutions":
        x = torch.randn(IMAGES, 3, 32, 32, device=DEVICE)
        return Convolutions(rate).to(DEVICE), x, lambda model, x: model(x).square().mean()
    tokens = torch.randint(0, VOCABULARY, (TEXTS, TOKENS + 1), device=DEVICE)
    return Language(rate, name == "spelled out").to(DEVICE), tokens, lambda model, tokens: model(tokens)


NETWORKS = ("convolutions", "attention", pytest.param("spelled out", marks=on_gpu))


def gradients(case: Case, amp: torch.dtype | None = None) -> list[Tensor]:
    model, batch, loss = case
    model.zero_grad()
    with torch.autocast(DEVICE, amp or torch.bfloat16, enabled=amp is not None):
        value = loss(model, batch)
    value.backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


@INNER
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_at_8_bits(name: str, amp: torch.dtype | None, inner: str) -> None:
    model, batch, loss = build(name)
    exact = gradients((copy.deepcopy(model), batch, loss))
    plain = gradients((copy.deepcopy(model), batch, loss), amp)
    gact_fx.compile(model, budget_bits=8, inner=inner)
    bound = 0.01 if amp is None else 0.01 + 1.5 * relative_error(plain, exact)
    for _ in range(3):
        assert relative_error(gradients((model, batch, loss), amp), exact) < bound
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)


@pytest.mark.parametrize("fuse", ["off", pytest.param("on", marks=on_gpu)])
@pytest.mark.parametrize("name", NETWORKS)
def test_bytes_held_at_4_bits(name: str, fuse: str) -> None:
    """With the compiled kernels and with what Inductor makes of the codec."""
    model, batch, loss = build(name, 0.1)
    known = [*model.parameters(), *model.buffers(), batch]
    eager = activation_bytes(loss(copy.deepcopy(model), batch), exclude=known)
    inner = "eager" if fuse == "off" and not ON_GPU else "inductor"
    gact_fx.compile(model, budget_bits=4, sample_batches=[batch], loss_fn=loss, fuse=fuse, inner=inner)
    found = activation_bytes(loss(model, batch), exclude=known)
    assert found < eager / 4
    assert gact_fx.inspect(model).bytes_after == pytest.approx(found, rel=0.02)


@INNER
def test_dropout_drops_the_same_again(inner: str) -> None:
    """What backward draws again is what forward drew: the gradient is zero where the output is."""
    linear = nn.Linear(64, 64)
    model = nn.Sequential(linear, nn.GELU(), nn.Dropout(0.5)).to(DEVICE)
    gact_fx.compile(model, budget_bits=4, min_elements=64, inner=inner)
    for _ in range(3):
        x = torch.randn(512, 64, device=DEVICE)
        out = model(x)
        (found,) = torch.autograd.grad(out.sum(), linear.bias)
        pre = F.linear(x, linear.weight, linear.bias).detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.gelu(pre).sum(), pre)
        expected = (slope * (out != 0) * 2).sum(0)
        assert relative_error([found.double()], [expected.double()]) < 0.1


@INNER
def test_random_numbers_and_buffers_are_those_of_a_step(inner: str) -> None:
    """Profiling leaves no trace: the generator and the running statistics are eager's afterwards."""
    model, batch, loss = build("convolutions")
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=4, inner=inner)
    before = torch.cuda.get_rng_state() if ON_GPU else torch.get_rng_state()
    for each in (model, reference):
        for _ in range(3):
            gradients((each, batch, loss))
    after = torch.cuda.get_rng_state() if ON_GPU else torch.get_rng_state()
    assert torch.equal(before, after)
    for found, expected in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@on_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_with_an_optimizer(mode: str) -> None:
    """With CUDA graphs where the mode asks for them: the loss falls like eager's."""
    torch.manual_seed(1)
    model, batch, loss = build("attention")
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=4, mode=mode)
    losses = []
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-3)
        for _ in range(8):
            value = loss(each, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append(value.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@on_gpu
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_fp16_with_a_gradient_scaler(inner: str) -> None:
    model, batch, loss = build("attention")
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=4, inner=inner)
    losses = []
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), 0.5)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**16)
        for _ in range(6):
            with torch.autocast(DEVICE, torch.float16):
                value = loss(each, batch)
            optimizer.zero_grad()
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(value.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


class Broken(Convolutions):
    """With a graph break between its two halves."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        torch._dynamo.graph_break()
        return self.head((hidden + F.gelu(self.again(self.inner(hidden)))).mean((2, 3)))


def test_a_graph_break_and_another_batch_size() -> None:
    model = Broken().to(DEVICE)
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner="inductor" if ON_GPU else "eager")
    for rows in (IMAGES, IMAGES, 8, 12):
        x = torch.randn(rows, 3, 32, 32, device=DEVICE)
        found, exact = (gradients((each, x, lambda m, x: m(x).square().mean())) for each in (model, reference))
        assert relative_error(found, exact) < 0.02


def test_the_peak_is_kept_and_measured() -> None:
    """A planned step needs no more than the report says, and far less than torch.compile."""
    model, batch, loss = build("attention", 0.1)
    plain = copy.deepcopy(model)
    if ON_GPU:
        plain.compile()
    gact_fx.compile(model, budget_bits=4, sample_batches=[batch], loss_fn=loss, inner="inductor" if ON_GPU else "eager")
    peaks = []
    for each in (model, plain):
        gradients((each, batch, loss))
        each.zero_grad()
        with gact_fx.measure_peak(each) as peak:
            loss(each, batch).backward()
        assert peak.nbytes is not None
        peaks.append(peak.nbytes)
    report = gact_fx.inspect(model)
    gradients_nbytes = sum(p.nbytes for p in model.parameters())
    assert report.peak_measured == peaks[0]
    assert peaks[0] - gradients_nbytes < (peaks[1] - gradients_nbytes) / 1.5
    assert report.peak_predicted is not None and peaks[0] < 1.1 * report.peak_predicted


@pytest.mark.parametrize("seed", range(3 if ON_GPU else 1))
def test_random_programs(seed: int) -> None:
    with torch.device(DEVICE):
        verdict = judge_program(steps_of(seed), inner="eager")
    assert verdict.kind in ("right", "unstable"), f"{verdict}\n{text(steps_of(seed))}"
