"""What PyTorch's registry knows of operators.

Private, tried with torch 2.11 and 2.13: the classes in ``torch._ops`` (public would be a way to ask a node's target
what it is), ``OpOverload._opname`` and ``_schema`` (public would be the same without the underscore),
``torch._C._dispatch_has_kernel_for_dispatch_key`` (public would be a question to ``torch.library``) and
``torch._assert_async`` (public would be an assertion that does not wait for the device).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# Functions that graphs call beside operators, and whose result is memory of its own, have this attribute.
MAKES_MEMORY = "makes_memory"


def name_of(target: Any) -> str:
    """An operator's name without namespace and overload, '' of what is none."""
    return str(getattr(target, "_opname", ""))


def packet_of(node: object) -> Any:
    """The operator that ``node`` calls, of whatever overload; None of what calls none."""
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def returns_alias(target: Any) -> bool:
    """Whether an operator may return the memory of an argument, as its schema says."""
    schema = getattr(target, "_schema", None)
    return any(result.alias_info is not None for result in getattr(schema, "returns", ()))


def writes(target: Any) -> bool:
    """Whether an operator writes to an argument, as its schema says."""
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


@functools.cache
def writing_form(target: Any) -> tuple[Any, str] | None:
    """The form of a pointwise operator that writes its result to an argument, and the name of that; None without."""
    tags = target.tags if isinstance(target, OpOverload) else ()
    # The purpose of a clone may be its layout.
    is_other = name_of(target) == "clone" or torch.Tag.nondeterministic_seeded in tags
    if torch.Tag.pointwise not in tags or writes(target) or is_other:
        return None
    own = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        if torch.Tag.generated in other.tags:
            # It makes the result elsewhere, and copies it.
            continue
        results = [argument.name for argument in other._schema.arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if len(results) == 1 and rest == own:
            return other, results[0]
    return None


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator, by name; what is not given has its default."""
    arguments = target._schema.arguments
    names = (argument.name for argument in arguments)
    defaults = {argument.name: argument.default_value for argument in arguments}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def call_with(target: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of an operator, by position and by name, that takes its own out of ``given``."""
    arguments = target._schema.arguments
    args = tuple(given[argument.name] for argument in arguments if not argument.kwarg_only)
    return args, {argument.name: given[argument.name] for argument in arguments if argument.kwarg_only}


def result_count(target: Any) -> int:
    """How many results an operator has."""
    return len(target._schema.returns)


def has_collectives(graph: fx.Graph) -> bool:
    """Whether running ``graph`` takes other ranks."""
    return any("c10d" in str(node.target) for node in graph.nodes if node.op == "call_function")


def has_kernel(operator: str, device_type: str) -> bool:
    """Whether ``operator`` ("namespace::name") has a kernel of its own for a device type, such as "cuda"."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, device_type.upper()))
    except RuntimeError:  # no such dispatch key
        return False


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Raise ``message`` on the device, some time, where ``condition`` is false."""
    torch._assert_async(condition, message)
