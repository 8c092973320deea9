"""``python -m gact_fx``: what can be asked without training."""

import argparse
import os
import sys
from collections.abc import Sequence

from gact_fx.api import estimate
from gact_fx.config import Config
from gact_fx.diagnostics.doctor import MISSING, describe, examine
from gact_fx.diagnostics.estimate import Subject, make_estimate, memory_nbytes
from gact_fx.diagnostics.estimate_by_name import NamedConfiguration, named_function, parse_settings
from gact_fx.diagnostics.plan_text import plan_text
from gact_fx.errors import GactError, UsageError
from gact_fx.plan import Plan
from gact_fx.training.sample_batches import default_loss

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 where something is missing, 2 where the command cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m gact_fx", description="Inspect plans and the installation.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    report = commands.add_parser("report", help="print a plan that plan.save wrote")
    report.add_argument("plan", help="the file, such as plan.json")
    commands.add_parser("doctor", help="say what is installed, what works, and what mends the rest; 1 if it must be")
    _add_estimate(commands.add_parser("estimate", help="say what training would take, before it is tried"))
    given = parser.parse_args(arguments)
    if given.command == "estimate":
        return _estimate(given)
    return _report(given.plan) if given.command == "report" else _doctor()


def _add_estimate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", help="a configuration class of transformers, such as BertConfig, or module:function, where the "
        "function returns (model, batch) or (model, batch, loss_fn)",
    )  # fmt: skip
    command.add_argument("--budget-bits", type=float, default=4.0)
    command.add_argument("--memory", help='such as "8GB": what is the largest batch?')
    command.add_argument(
        "--optimizer-states", type=int, default=2, help="2 for Adam, 1 for SGD with momentum, 0 for SGD"
    )
    command.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    command.add_argument("--batch", type=int, help="rows, for a configuration class; default 8")
    command.add_argument("--length", type=int, help="tokens of a row, for a configuration class; default 128")
    command.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help="fields of the configuration"
    )


def _estimate(given: argparse.Namespace) -> int:
    try:
        if ":" in given.model:
            if given.batch is not None or given.length is not None or given.set:
                raise UsageError(
                    "--batch, --length and --set are for configuration classes; the function makes model and batch"
                )
            # As `python -m` finds modules.
            sys.path.insert(0, os.getcwd())
            model, batch, *loss = named_function(given.model)
            print(estimate(
                model, batch, budget_bits=given.budget_bits, loss_fn=loss[0] if loss else None, memory=given.memory,
                optimizer_states=given.optimizer_states, inner=given.inner,
            ))  # fmt: skip
            return 0
        rows, length = (8 if given.batch is None else given.batch), (128 if given.length is None else given.length)
        if rows < 1 or length < 1:
            raise UsageError(f"--batch and --length must be at least 1, got {rows} and {length}")
        named = NamedConfiguration(given.model, parse_settings(given.set), rows, length)
        config = Config(budget_bits=given.budget_bits, inner=given.inner)
        subject = Subject(named.make, rows, default_loss, config, optimizer_states=given.optimizer_states)
        print(make_estimate(subject, memory_nbytes(given.memory)))
    except GactError as error:
        return _fail(str(error).removeprefix("python -m gact_fx estimate: "))
    return 0


def _report(path: str) -> int:
    try:
        plan = Plan.load(path)
    except OSError as error:
        return _fail(f"{path} cannot be read: {error.strerror or error}")
    except ValueError as error:
        return _fail(str(error).replace("\n", " "))
    print(plan_text(plan))
    return 0


def _doctor() -> int:
    findings = examine()
    print(describe(findings))
    return int(any(finding.status == MISSING for finding in findings))


def _fail(message: str) -> int:
    print(f"python -m gact_fx: {message}", file=sys.stderr)
    return WRONG_USE


def _run() -> int:
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough (`| head`); Python would flush once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(_run())
