"""Small networks whose backward bends, breaks or has a pole in what is saved: ordinary code that codes can get wrong.

Each is a function of a hidden layer ``h = l(x)`` and of two trainable vectors ``g`` and ``g2``; `build` gives a model,
a batch and a loss by name, as ``networks.py`` does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE, ROWS = 64, 128
Loss = Callable[[nn.Module, Any], Tensor]


class Bent(nn.Module):
    """``output(network, h)`` of a hidden layer h, whose deviation is about half of ``scale``."""

    def __init__(self, output: Callable[..., Any], scale: float) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.g, self.g2 = nn.Parameter(torch.randn(SIZE)), nn.Parameter(torch.randn(SIZE))
        self.output, self.scale = output, scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(self, self.l(x) * self.scale)
        return result


class ConvHardswish(nn.Module):
    """Convolutions with Hardswish, and squeeze-and-excite (MobileNetV3)."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.o = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = F.hardswish(self.d(F.hardswish(self.c(x))))
        return z * F.hardsigmoid(self.o(z.mean((2, 3))))[:, :, None, None]


class PPO(nn.Module):
    """Proximal policy optimisation's clipped loss (Schulman et al. 2017, equation 7), with a clipped value loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.policy(h), self.value(h)


def _ppo_loss(model: nn.Module, batch: Any) -> Tensor:
    x, old, advantage, returns, before = batch
    log_probability, value = model(x)
    ratio = (log_probability - old).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    clipped = before + (value - before).clamp(-0.2, 0.2)
    loss: Tensor = policy.mean() + torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    return loss


def _ppo_batch() -> tuple[Tensor, ...]:
    return tuple(torch.randn(ROWS, SIZE) * scale for scale in (1.0, 0.3, 1.0, 1.0, 0.3))


def _weighed(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    weighed: Tensor = (out * torch.linspace(-1, 1, out.shape[-1])).sum()
    return weighed


def _fourier(m: Any, h: Tensor) -> Any:
    return torch.cat([h.sin(), h.cos()], -1)[:, ::2] * m.g


def _snake(m: Any, h: Tensor) -> Any:
    return (h + (m.g * h).sin() ** 2 / m.g) * m.g2


def _power(m: Any, h: Tensor) -> Any:
    h = F.relu(h) + 1e-6
    return h.pow(torch.full_like(h, -0.5)) * m.g + h * m.g2


def _gaussian(m: Any, h: Tensor) -> Any:
    variance = F.softplus(h) + 1e-3
    return F.gaussian_nll_loss(m.o(h), torch.ones_like(h), variance, reduction="none")


def _beta(m: Any, h: Tensor) -> Any:
    a, b = F.softplus(h) + 0.05, F.softplus(m.o(h)) + 0.05
    return torch.distributions.Beta(a, b, validate_args=False).log_prob(torch.full_like(h, 0.3))


def _gamma(m: Any, h: Tensor) -> Any:
    a, b = F.softplus(h) + 0.05, F.softplus(m.o(h)) + 0.05
    return torch.distributions.Gamma(a, b, validate_args=False).log_prob(torch.full_like(h, 0.7))


def _detached(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda m, h: function(h.tanh().clamp(-0.999, 0.999)).detach() * h * m.g


# name → (output, scale)
_BENT: dict[str, tuple[Callable[..., Any], float]] = {
    "elu": (lambda m, h: F.elu(h), 3.5),
    "elu x8": (lambda m, h: F.elu(h), 14.0),
    "selu": (lambda m, h: F.selu(h), 3.5),
    "celu": (lambda m, h: F.celu(h, 0.5), 5.0),
    "softplus": (lambda m, h: F.softplus(h), 3.5),
    "softplus x5": (lambda m, h: F.softplus(h), 12.0),
    "relu ** 1.5": (lambda m, h: m.o(F.relu(h) ** 1.5), 2.0),
    "detached sqrt": (lambda m, h: F.relu(h).detach().sqrt() * m.g + h * m.g2, 2.0),
    "detached sqrt beside a product": (lambda m, h: h.abs().detach().sqrt() * m.g + m.o(h), 2.0),
    "logit of sigmoid": (lambda m, h: torch.logit(torch.sigmoid(h)) * m.g, 2.0),
    "sin and cos": (_fourier, 80.0),
    "snake": (_snake, 8.0),
    "pow of a tensor": (_power, 1.0),
    "huber": (lambda m, h: F.huber_loss(m.o(h), h.detach() * 0.5, delta=0.3, reduction="none") * m.g, 2.0),
    "cumprod": (lambda m, h: (h * 0.3 + 1).cumprod(-1) * m.g, 1.0),
    "lgamma": (lambda m, h: torch.lgamma(F.softplus(h) + 0.05) * m.g, 3.5),
    "gaussian nll": (_gaussian, 3.5),
    "beta": (_beta, 3.5),
    "gamma": (_gamma, 3.5),
    "detached asin": (_detached(torch.asin), 2.0),
    "detached acos": (_detached(torch.acos), 2.0),
    "detached atanh": (_detached(torch.atanh), 2.0),
    "detached erfinv": (_detached(torch.erfinv), 2.0),
    "sigmoid, tanh": (lambda m, h: (torch.sigmoid(h) * m.g).tanh() * m.g2, 3.5),
    "relu6": (lambda m, h: F.relu6(h) * m.g + m.o(h), 8.0),
    "softshrink": (lambda m, h: F.softshrink(h) * m.g, 3.5),
    "hardshrink": (lambda m, h: F.hardshrink(h) * m.g, 3.5),
    "hardswish": (lambda m, h: F.hardswish(h) * m.g, 6.0),
    "log-softmax of a product": (lambda m, h: F.log_softmax(m.o(h) * h, -1) * m.g, 2.0),
}  # fmt: skip
NAMES = (*_BENT, "hardswish convolutions", "ppo")


def build(name: str) -> tuple[nn.Module, Any, Loss]:
    """Model, batch and loss by name.

    Raises:
        KeyError: no network has that name.
    """
    torch.manual_seed(0)
    if name == "ppo":
        return PPO(), _ppo_batch(), _ppo_loss
    if name == "hardswish convolutions":
        return ConvHardswish(), torch.randn(4, 3, 24, 24), _weighed
    return Bent(*_BENT[name]), torch.randn(ROWS, SIZE), _weighed
