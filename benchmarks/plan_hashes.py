"""Hashes of plans and of one step's gradients: two versions that print the same decide and compute the same.

    python benchmarks/plan_hashes.py [--budget-bits 4 2] [--inner inductor] [--compare FILE] [NETWORK ...]

Every line is a network at a budget: the hash of its plan, the hash of all its parameters' gradients in one training
step under that plan (dropout on, seeded), and the hash of the gradients of a step that profiles itself. One thread,
so that sums which PyTorch forms in the order of its threads come out the same. ``--compare`` reads the JSON of an
earlier run, and fails where a hash differs. ``--plans FOLDER`` keeps the plans.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from machine import describe, save
from networks import build

import gact_fx


def gradient_hash(model: torch.nn.Module) -> str:
    """SHA-256 of every parameter's name and gradient, bit by bit."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is not None:
            digest.update(parameter.grad.reshape(-1).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def plan_hash(plan: gact_fx.Plan) -> str:
    """SHA-256 of a plan's decisions, as it is saved: of every tensor its key, code, seed and sensitivity.

    Tensors that the plan keeps exact have no code, whatever the file says of one.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        data = json.loads((Path(folder) / "plan.json").read_text())
    names = ("key", "bits", "sensitivity", "seed", "rounding", "group_size", "merged")
    for graph in data["graphs"]:
        graph["tensors"] = [
            [tensor[name] for name in names[: len(names) if tensor["bits"] is not None else 3]]
            for tensor in graph["tensors"]
        ]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def measure(name: str, budget_bits: float, inner: str, folder: Path | None) -> dict[str, str]:
    """Hashes of one network: its plan, a planned step, and a step that profiles itself."""
    torch.compiler.reset()
    model, batch, loss_fn = build(name)
    gact_fx.compile(model, budget_bits=budget_bits, inner=inner, sample_batches=[batch], loss_fn=loss_fn)
    torch.manual_seed(1)
    loss_fn(model, batch).backward()
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    if folder is not None:
        plan.save(folder / f"{name}-{budget_bits:g}bits.json")
    torch.compiler.reset()
    profiled, batch, loss_fn = build(name)
    gact_fx.compile(profiled, budget_bits=budget_bits, inner="eager")
    torch.manual_seed(1)
    loss_fn(profiled, batch).backward()
    return {
        "plan": plan_hash(plan),
        "gradients": gradient_hash(model),
        "profiled step": gradient_hash(profiled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "gpt2", "resnet50", "llama", "swin", "gcn", "gat"])
    parser.add_argument("--budget-bits", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--inner", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--compare", type=Path, help="results of an earlier run")
    parser.add_argument("--plans", type=Path, help="folder to keep the plans in")
    options = parser.parse_args()
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print(f"inner={options.inner}; {describe()}")
    found: dict[str, dict[str, str]] = {}
    before = json.loads(options.compare.read_text())["results"] if options.compare else {}
    different = 0
    for name in options.networks:
        for bits in options.budget_bits:
            hashes = found[f"{name} {bits:g}"] = measure(name, bits, options.inner, options.plans)
            line = "  ".join(f"{what} {value}" for what, value in hashes.items())
            changed = [what for what, value in before.get(f"{name} {bits:g}", hashes).items() if value != hashes[what]]
            different += len(changed)
            print(
                f"{name:10} {bits:g} bits  {line}" + (f"  DIFFERENT: {', '.join(changed)}" * bool(changed)), flush=True
            )
    if not options.compare:
        save(f"plan-hashes-{options.inner}", found)
    if different:
        sys.exit(f"{different} hashes differ from {options.compare}")


if __name__ == "__main__":
    main()
