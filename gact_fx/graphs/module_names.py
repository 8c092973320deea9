"""Which module of the model a node of a graph was traced in.

Private, tried with torch 2.11 and 2.13: ``meta["nn_module_stack"]``, whose keys begin with the modules' ``id`` and
whose values begin with Dynamo's expressions for them, and ``meta["fwd_nn_module_stack"]``, which AOTAutograd copies to
the nodes of backward (public would be the modules' names as ``torch.export`` gives them).
"""

import re
from collections.abc import Mapping

from torch import fx

# L['self'].layer, L['function'].__self__.layer, G['net'].layer.
_ROOT = re.compile(r"^[LG]\[['\"](?P<name>[^'\"]*)['\"]\]")
_MODEL = ("self", "function")
_INDEX = re.compile(r"\[['\"]?(?P<index>[^'\"\]]*)['\"]?\]")
_GETATTR = re.compile(r"getattr\((?P<owner>[^()]*), ['\"](?P<name>[^'\"]*)['\"]\)")
_NOISE = ("__self__", "__func__", "_modules", "_orig_mod", "")


def module_path(node: fx.Node) -> str:
    """The innermost module that ``node``, or the node of forward behind it, was traced in, as ``encoder.layer.0``.

    It is '' for code outside of modules. Behind a graph break the path begins at the module whose code goes on.
    """
    found = _innermost(node)
    return _clean(found[1]) if found is not None else ""


def full_names(module: fx.GraphModule, names: Mapping[int, str]) -> dict[str, str]:
    """By `module_path`, the names of the modules in a graph; ``names`` has those of the model's modules by ``id``.

    Code that Dynamo went on with behind a graph break, '' by its path, belongs to the module around those it calls.
    """
    found = (_innermost(node) for node in module.graph.nodes)
    keys = {_clean(path): key for key, path in filter(None, found)}
    known = {path: names[key] for path, key in keys.items() if key in names}
    around = {name.removesuffix(path).removesuffix(".") for path, name in known.items() if name.endswith(path)}
    return {"": next(iter(around)), **known} if len(around) == 1 else known


def _innermost(node: fx.Node) -> tuple[int, str] | None:
    """``id`` of the module, -1 where it is not known, and Dynamo's expression for it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    key, value = list(stack.items())[-1]
    # The second call of a module has "@1" behind its id.
    number = str(key).split("@")[0]
    return int(number) if number.isdigit() else -1, str(value[0])


def _clean(expression: str) -> str:
    while _GETATTR.search(expression):
        expression = _GETATTR.sub(r"\g<owner>.\g<name>", expression)
    root = _ROOT.match(expression)
    begin = []
    if root is not None:
        begin = [] if root["name"] in _MODEL else [root["name"]]
        expression = expression[root.end() :]
    parts = _INDEX.sub(r".\g<index>", expression).split(".")
    if not begin and parts[0] == "self":
        parts = parts[1:]
    return ".".join([*begin, *(part for part in parts if part not in _NOISE)])
