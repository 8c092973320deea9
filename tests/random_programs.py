"""Random programs of ordinary operators, for finding gradients that codes make wrong without a word.

A program is a list of steps ``(operator, first, second)``, all of them whole numbers: which operator, and which of the
tensors made so far it reads. So hypothesis shrinks a failing program to the operators that it takes.

    python tests/random_programs.py --count 2000            # judge so many, from seed 0 on
    python tests/random_programs.py --count 1 --seed 1234   # print and judge one again
"""

import argparse
import collections
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from op_judge import Verdict, judge_module
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 32
Step = tuple[int, int, int]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _rows_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    written = a.clone()
    written[::2] = b[1::2]
    return written.mul_(1.5).clamp_(-3, 3)


def _attention(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a @ b.t()) / WIDTH**0.5).softmax(-1) @ a


def _halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    value, gate = torch.cat([a, b], -1)[:, WIDTH // 2 : -WIDTH // 2].chunk(2, -1)
    return torch.cat([value * gate.sigmoid(), gate], -1)


# Each takes tensors of ROWS x WIDTH and gives one of them; most of them read the first alone.
OPERATORS: dict[str, Binary] = {
    "relu": lambda a, b: a.relu(),
    "elu": lambda a, b: F.elu(a),
    "gelu": lambda a, b: F.gelu(a),
    "silu": lambda a, b: F.silu(a),
    "mish": lambda a, b: F.mish(a),
    "softplus": lambda a, b: F.softplus(a),
    "hardswish": lambda a, b: F.hardswish(a),
    "leaky_relu": lambda a, b: F.leaky_relu(a, 0.2),
    "relu6": lambda a, b: F.relu6(a * 3),
    "softshrink": lambda a, b: F.softshrink(a),
    "sigmoid": lambda a, b: a.sigmoid(),
    "tanh": lambda a, b: a.tanh(),
    "sin": lambda a, b: a.sin(),
    "sin and cos": lambda a, b: a.sin() + (2 * a).cos(),
    "exp": lambda a, b: a.clamp(max=2).exp(),
    "log": lambda a, b: a.abs().log1p(),
    "sqrt": lambda a, b: (a.square() + 0.1).sqrt(),
    "rsqrt": lambda a, b: (a.square() + 1).rsqrt(),
    "erf": lambda a, b: a.erf(),
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 0.5),
    "abs": lambda a, b: a.abs(),
    "square": lambda a, b: a.square(),
    "power": lambda a, b: a.relu() ** 1.5,
    "clamp": lambda a, b: a.clamp(-1, 1),
    "sign": lambda a, b: a * a.sign(),
    "detach": lambda a, b: a * b.detach(),
    "straight through": lambda a, b: a + (a.round() - a).detach(),
    "softmax": lambda a, b: a.softmax(-1) * WIDTH,
    "log_softmax": lambda a, b: a.log_softmax(-1),
    "logsumexp": lambda a, b: a - a.logsumexp(-1, keepdim=True),
    "layer_norm": lambda a, b: F.layer_norm(a, (WIDTH,)),
    "rms_norm": lambda a, b: a * (a.square().mean(-1, keepdim=True) + 1e-3).rsqrt(),
    "batch_norm": lambda a, b: F.batch_norm(a, None, None, training=True),
    "normalize": lambda a, b: F.normalize(a, dim=-1) * 4,
    "dropout": lambda a, b: F.dropout(a, 0.2),
    "cumsum": lambda a, b: a.cumsum(-1) / 8,
    "flip": lambda a, b: a.flip(0),
    "shift": lambda a, b: a.roll(3, 1),
    "mean": lambda a, b: a - a.mean(0),
    "maximum of rows": lambda a, b: a - a.max(-1, keepdim=True).values,
    "sort": lambda a, b: a.sort(-1).values,
    "masked": lambda a, b: a.masked_fill(b > 0, -0.5),
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "larger": lambda a, b: torch.maximum(a, b),
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - 0.5 * b,
    "multiply": lambda a, b: a * b,
    "gate": lambda a, b: a * b.sigmoid(),
    "divide": lambda a, b: a / (1 + b.abs()),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "attention": _attention,
    "halves": _halves,
    "rows in place": _rows_in_place,
    "outer": lambda a, b: a @ (b.t() @ b) / ROWS,
    "huber": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "cosine": lambda a, b: a * F.cosine_similarity(a, b, dim=-1).unsqueeze(-1),
    "detach, bent": lambda a, b: a * (3 * b.detach()).sin(),
    "detach of itself": lambda a, b: a * (8 * a.detach()).cos(),
}
NAMES = ["linear", *OPERATORS]


class Program(nn.Module):
    """Runs ``steps`` on the layers' results; every fourth operator or so is a trainable linear layer."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = [(NAMES[kind % len(NAMES)], first, second) for kind, first, second in steps]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for name, *_ in self.steps if name == "linear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, layers = [self.first(x)], iter(self.layers)
        for name, first, second in self.steps:
            # The last few are read more often than what lies far behind.
            a, b = made[-1 - first % min(3, len(made))], made[-1 - second % len(made)]
            made.append(next(layers)(a) if name == "linear" else OPERATORS[name](a, b))
        weights = torch.linspace(-1, 1.5, WIDTH, dtype=x.dtype, device=x.device)
        return torch.stack([(h.tanh() * weights).sum() for h in made[-2:]]).sum()


def steps_of(seed: int, known: int = len(NAMES)) -> list[Step]:
    """A program of 5 to 25 of the first ``known`` operators, of which about a quarter is linear layers."""
    drawn = random.Random(seed)
    count = drawn.randint(5, 25)
    kinds = [0 if drawn.random() < 0.25 else drawn.randrange(1, known) for _ in range(count)]
    return [(kind, drawn.randrange(60), drawn.randrange(60)) for kind in kinds]


def judge_program(steps: Sequence[Step], bits: int = 8, **options: Any) -> Verdict:
    """Whether the program's gradient is off by no more than three times the deviation that its plan predicts."""
    torch.manual_seed(0)
    model = Program(steps)
    return judge_module(model, [torch.randn(ROWS, WIDTH) * 1.5], bits, seed=1, **options)


def text(steps: Sequence[Step]) -> str:
    """The program as one would write it."""
    names = ["h0"]
    lines = ["h0 = first(x)"]
    for kind, first, second in steps:
        a, b = names[-1 - first % min(3, len(names))], names[-1 - second % len(names)]
        names.append(f"h{len(names)}")
        lines.append(f"{names[-1]} = {NAMES[kind % len(NAMES)]}({a}, {b})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--recompute", choices=("auto", "off", "full"), default="auto")
    given = parser.parse_args()
    count: collections.Counter[str] = collections.Counter()
    for seed in range(given.seed, given.seed + given.count):
        verdict = judge_program(steps_of(seed), given.bits, inner=given.inner, recompute=given.recompute)
        count[verdict.kind] += 1
        if verdict.kind not in ("right", "unstable") or given.count == 1:
            print(f"seed {seed}: {verdict}\n{text(steps_of(seed))}", flush=True)
    print(dict(count))


if __name__ == "__main__":
    main()
