"""Keeps other compilers from compiling a model's own code in the place of what gact_fx has it run."""

import functools
import logging
from typing import Any

from torch import nn

from gact_fx.graphs.dynamo import compiled_call
from gact_fx.training.lifecycle import Lifecycle

log = logging.getLogger("gact_fx")


def guard(module: nn.Module) -> None:
    """Have ``torch.compile(module)``, or of a function that calls it, run what ``module`` runs, and
    ``module.compile()`` leave it at that.

    Both are attributes of the instance, by which Dynamo tells that a module's call is not what its class says. In
    copies, which run as if they had never been compiled, they do what the class does.
    """
    # Past nn.Module.__setattr__, as it is past the class.
    object.__setattr__(module, "__call__", functools.partial(_call, module))
    # A class may call something of its own so.
    if type(module).compile is nn.Module.compile:
        object.__setattr__(module, "compile", functools.partial(_compile, module))


def unguard(module: nn.Module) -> None:
    """Undo `guard`."""
    for name in {"__call__", "compile"} & module.__dict__.keys():
        object.__delattr__(module, name)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).__call__(module, *args, **kwargs)


def _compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if not isinstance(compiled_call(module), Lifecycle):
        type(module).compile(module, *args, **kwargs)
        return
    log.warning(
        "%s.compile() does nothing: gact_fx.compile has compiled this model; give it the options that torch.compile "
        "takes (mode, dynamic, fullgraph, inductor_options), or compile with budget_bits=None", type(module).__name__,
    )  # fmt: skip
