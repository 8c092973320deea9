"""``python -m gact_fx``: what can be asked without training."""

import argparse
import os
import sys
from collections.abc import Sequence

from gact_fx.diagnostics.doctor import MISSING, describe, examine
from gact_fx.diagnostics.plan_text import plan_text
from gact_fx.plan import Plan

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 where something is missing, 2 where the command cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m gact_fx", description="Inspect plans and the installation.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    report = commands.add_parser("report", help="print a plan that plan.save wrote")
    report.add_argument("plan", help="the file, such as plan.json")
    commands.add_parser("doctor", help="say what is installed, what works, and what mends the rest; 1 if it must be")
    given = parser.parse_args(arguments)
    return _report(given.plan) if given.command == "report" else _doctor()


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
