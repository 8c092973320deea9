"""Batches that vary in rows and length: compiled a few times at first, and then never again."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.training.backend import Backend
from gact_fx.training.model import session_of

Batch = tuple[torch.Tensor, ...]


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, stride=2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.b(torch.relu(self.bn(self.a(x)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)

    @staticmethod
    def batch(rows: int, length: int) -> Batch:
        return torch.randn(rows, 3, 8, 8), torch.randint(0, 10, (rows,))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.tokens(x) + self.places.weight[: x.shape[1]])
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    @staticmethod
    def batch(rows: int, length: int) -> Batch:
        return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))


class Broken(Transformer):
    """With a graph break, behind which the length is found out anew."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.tokens(x) + self.places.weight[: x.shape[1]])
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(self.layer(h)).flatten(0, 1), y.flatten())


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each graph that a backend of ours is given; True while profiling."""
    found: list[bool] = []
    call = Backend.__call__

    def counted(self: Backend, *args: Any) -> Any:
        found.append(self._interpreted)
        return call(self, *args)

    monkeypatch.setattr(Backend, "__call__", counted)
    return found


# A convolution's own rule splits batches at 16 rows (torch 2.13), Dynamo those of one row off.
WARM_UP = [(8, 16), (20, 24), (5, 12), (1, 9)]


@pytest.mark.parametrize(
    ("model", "graphs", "sampled"),
    [
        (Cnn, 1, True),
        pytest.param(Transformer, 1, True, marks=pytest.mark.slow),
        pytest.param(Transformer, 1, False, marks=pytest.mark.slow),
        pytest.param(Broken, 2, False, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_after_warm_up(
    model: Callable[[], Any], graphs: int, sampled: bool, compilations: list[bool]
) -> None:
    compressed, exact = model(), model()
    exact.load_state_dict(compressed.state_dict())
    samples: dict[str, Any] = {"sample_batches": [compressed.batch(8, 16)]} if sampled else {}
    gact_fx.compile(compressed, inner="eager", budget_bits=8, min_elements=256, **samples)
    draw = random.Random(0)

    def step(rows: int, length: int) -> None:
        batch = compressed.batch(rows, length)
        compressed(*batch).backward(), exact(*batch).backward()
        found, wanted = gradients(compressed), gradients(exact)
        assert len(found) == len(wanted) and relative_error(found, wanted) < 0.02, (rows, length)

    for rows, length in WARM_UP:
        step(rows, length)
    # Profiled at one size; the plan, for any number of rows from 2 (or from 2 to 15 and from 16), and for one row.
    assert compilations.count(True) == graphs and graphs < compilations.count(False) <= 4 * graphs
    warm = len(compilations)
    for _ in range(20):
        step(draw.randint(1, 32), draw.randint(2, 32))
    assert len(compilations) == warm
    assert gact_fx.inspect(compressed).ratio > 2


class Rows(nn.Module):
    """The mean over the length of what is small and quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)).mean(1)).square().mean()


def test_the_first_step_may_have_one_row(compilations: list[bool]) -> None:
    model = gact_fx.compile(Rows(), inner="eager", min_elements=64)
    for rows, length in [(1, 16), *WARM_UP]:
        model(torch.randn(rows, length, 16)).backward()
    warm = len(compilations)
    for rows in (3, 1, 17):
        model(torch.randn(rows, 2 * rows + 2, 16)).backward()
    assert len(compilations) == warm and gact_fx.inspect(model).ratio > 2


def test_profiling_again_is_compiled_once_for_all_sizes(compilations: list[bool]) -> None:
    model = gact_fx.compile(Rows(), inner="eager", min_elements=64, profile_every=2, adaptive=False)
    counts = []
    for rows, length in [(8, 16), (20, 24), (5, 12), (7, 9), (11, 30), (13, 31), (9, 9), (3, 20)]:
        model(torch.randn(rows, length, 16)).backward()
        counts.append(compilations.count(True))
    # The very first step at one size, and the steps that are profiled again at any.
    assert counts[-1] == 2 and counts[0] == 1


class UNet(nn.Module):
    """Half the resolution, attention over its pixels, and back, beside what skips all that."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.shrink = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.qkv, self.mix = nn.GroupNorm(4, 16), nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.grow, self.exit = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = F.silu(self.entry(x))
        x = self.shrink(skipped)
        query, key, value = (part.flatten(2).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 1))
        attended = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        x = F.silu(x + self.mix(attended.transpose(1, 2).reshape(x.shape)))
        return self.exit(torch.cat([skipped, self.grow(x)], 1)).square().mean()


def test_sizes_of_one_model_are_not_dynamic_in_another() -> None:
    for rows in (64, 128):
        model = gact_fx.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), inner="eager")
        for _ in range(2):
            model(torch.randn(rows, 64)).sum().backward()
        assert gact_fx.inspect(model).rows
        assert all(len(row.shape) == 2 for row in gact_fx.inspect(model).rows)


def test_sizes_of_a_freed_model_are_not_dynamic_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later may have the ``id`` of what was freed; here everything has the same."""
    monkeypatch.setattr("gact_fx.training.model.id", lambda target: 7, raising=False)
    for rows in ((8, 6), (4,)):
        model = Cnn()
        gact_fx.compile(model, inner="eager", min_elements=64)
        for count in (*rows, rows[-1]):
            model(*Cnn.batch(count, 0)).backward()
        session = session_of(model)
        assert session is not None and session.graphs
        varies = any(saved.dynamic for graph in session.graphs for saved in graph.analysis.saved)
        assert varies == (len(rows) > 1)
        del model, session


@pytest.mark.slow
def test_inductor_compiles_attention_over_the_pixels_of_images_of_any_size() -> None:
    """Torch 2.13's own fails at the second size, with gradients or without (`gact_fx.graphs.mended_inductor`)."""
    compressed, exact = UNet(), UNet()
    exact.load_state_dict(compressed.state_dict())
    gact_fx.compile(compressed, budget_bits=8, min_elements=256)
    for pixels in (16, 24, 32, 20, 12):
        images = torch.randn(4, 3, pixels, pixels)
        compressed.zero_grad()
        exact.zero_grad()
        # Inductor's cache would have what was compiled here before.
        with torch._inductor.config.patch(force_disable_caches=True):
            compressed(images).backward()
        exact(images).backward()
        assert relative_error(gradients(compressed), gradients(exact)) < 0.02, pixels
    assert gact_fx.inspect(compressed).ratio > 1.5


def test_sample_batches_with_fewer_rows_than_were_traced() -> None:
    """The third batch runs graphs that were traced with the rows of the second."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ELU(), nn.Linear(256, 8))
    samples = [(torch.randn(rows, 256),) for rows in (4096, 3072, 1024)]
    gact_fx.compile(
        model, inner="eager", sample_batches=samples, loss_fn=lambda model, batch: model(*batch).square().mean()
    )
    assert gact_fx.inspect(model).plan is not None
