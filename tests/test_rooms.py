"""What holds the rooms apart: arrows, sizes of files and functions, and private PyTorch API in graphs/ alone.

``python tests/test_rooms.py`` prints the figures. The sources are read, not imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Top to bottom, as in the contract in pyproject.toml; those of one layer do not know each other.
LAYERS = (
    ("__main__", "integrations"),
    ("api", "accelerate"),
    ("diagnostics",),
    ("training",),
    ("profiling", "planning"),
    ("passes", "breaks"),
    ("plan", "config", "ops"),
    ("records", "options"),
    ("patterns",),
    ("codec",),
    ("graphs",),
    ("errors",),
)
LEVEL = {room: -number for number, layer in enumerate(LAYERS) for room in layer}
LONGEST_FILE, LONGEST_FUNCTION = 300, 60
# What may be longer: paths, and "path:function".
LONGER_FILES: frozenset[str] = frozenset()
LONGER_FUNCTIONS = frozenset({"passes/decide_eligibility.py:decide_eligibility"})

# PyTorch's, by the name of the attribute alone, whatever it is read from but ``self``.
PRIVATE_NAMES = {
    "_cdata", "_version", "_is_view", "_base", "_compiled_call_impl", "_call_impl", "_opname", "_schema",
    "_input_metadata", "_get_active_ddp_module", "_boxed_call",
}  # fmt: skip
PRIVATE_PREFIXES = ("_saved_", "_raw_saved")
# Without an underscore, and as private: undocumented, or said to change.
PRIVATE_MODULES = (
    "functorch", "torch.fx.experimental", "torch.fx.passes", "torch.multiprocessing.reductions"
)  # fmt: skip
# Names of operators begin with an underscore as they like; graphs consist of them.
OPERATORS = "torch.ops"


@functools.cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the package by name; ``gact_fx.passes`` lies in passes/."""
    found = {}
    for folder, package in (("gact_fx", ("gact_fx",)), ("passes", ("gact_fx", "passes"))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            # Beside an installation for development there may be a link from gact_fx/passes to passes/.
            if folder == "gact_fx" and parts[0] == "passes":
                continue
            name = ".".join((*package, *parts)).removesuffix(".__init__")
            found[name] = (path, ast.parse(path.read_text(), str(path)))
    return found


def room_of(module: str) -> str:
    """ "codec" of "gact_fx.codec.layout"; '' of the package itself."""
    return module.split(".")[1] if "." in module else ""


def imports_of(module: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import of our own, those in functions and for types alone included."""
    _, tree = sources()[module]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if (name := whole if whole in sources() else node.module) in sources():
                    yield node.lineno, str(name)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in sources())


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """A way round for every module that is on one and was not on one before."""
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for following in sorted(edges.get(name, ())):
                follow(following, [*way, name])
            done.add(name)

    for name in sorted(edges):
        follow(name, [])
    return found


def module_graph() -> dict[str, set[str]]:
    return {module: {name for _, name in imports_of(module)} for module in sources() if room_of(module)}


def room_graph() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {room: set() for room in LEVEL}
    for module, names in module_graph().items():
        edges.setdefault(room_of(module), set()).update({room_of(name) for name in names} - {room_of(module), ""})
    return edges


def floors(edges: dict[str, set[str]]) -> int:
    """The rooms on the longest way down."""

    @functools.cache
    def height(room: str) -> int:
        return 1 + max((height(below) for below in edges[room]), default=0)

    return max(height(room) for room in edges)


def against_arrows() -> list[str]:
    """Imports from a room into one that is not below it."""
    found = []
    for module in sources():
        here = room_of(module)
        for line, name in imports_of(module) if here else ():
            there = room_of(name)
            if there != here and (not there or LEVEL[there] >= LEVEL[here]):
                found.append(f"{module}:{line} imports {name}")
    return found


def long_files() -> dict[str, int]:
    counts = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path, _ in sources().values()}
    return {path: count for path, count in counts.items() if count > LONGEST_FILE}


def long_functions() -> dict[str, int]:
    found = {}
    for path, tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                count = node.end_lineno - node.lineno + 1
                if count > LONGEST_FUNCTION:
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = count
    return found


class _PrivateUses(ast.NodeVisitor):
    """Collects the uses of PyTorch's private API in one module, and assignments to PyTorch's attributes."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        # What a name stands for: "torch", "torch.fx", "torch.ops.aten", and so on, in whatever function.
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check_module(node, alias.name)
            target = alias.name if alias.asname else alias.name.split(".")[0]
            self._bind(alias.asname or target, target)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            self._check_module(node, whole)
            self._bind(alias.asname or alias.name, whole)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._path(node.value)
        for target in node.targets:
            if value and isinstance(target, ast.Name):
                self._bind(target.id, value)
            self._check_assigned(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._check_assigned(node.target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        value = self._path(node.value) if node.value is not None else ""
        if value and isinstance(node.target, ast.Name):
            self._bind(node.target.id, value)
        self._check_assigned(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._check_assigned(target)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        whole = self._path(node)
        if whole:
            self._check_module(node, whole)
        elif _is_private_name(node.attr) and not _is_self(node.value):
            self._note(node, f".{node.attr}")
        if not whole:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # getattr(x, "_version") and its kin, setattr(torch, ...).
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "__setattr__", "__getattribute__"):
            for argument in node.args:
                text = argument.value if isinstance(argument, ast.Constant) else ""
                if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
                    text = argument.values[0].value
                if isinstance(text, str) and _is_private_name(text):
                    self._note(node, f"{called}(…, {text!r})")
            if node.args and self._is_private(f"{self._path(node.args[0])}.{_text(node.args[1:2])}"):
                self._note(node, f"{called}({self._path(node.args[0])}, {_text(node.args[1:2])!r})")
        if called in ("setattr", "delattr", "__setattr__") and node.args and self._path(node.args[0]):
            self._note(node, f"{called}({self._path(node.args[0])}, …)")
        if called == "import_module" and node.args and self._is_private(_text(node.args[:1])):
            self._note(node, f"import_module({_text(node.args[:1])!r})")
        self.generic_visit(node)

    def _bind(self, name: str, target: str) -> None:
        if target.split(".")[0] in ("torch", "functorch"):
            self._names[name] = target

    def _path(self, node: ast.expr) -> str:
        """The dotted name of something of torch's, '' of anything else."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        if isinstance(node, ast.Attribute) and (owner := self._path(node.value)):
            return f"{owner}.{node.attr}"
        return ""

    def _check_assigned(self, target: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                self._check_assigned(item)
        elif isinstance(target, (ast.Attribute, ast.Subscript)) and (whole := self._path(target.value)):
            self._note(target, f"assigns to {whole}")

    def _check_module(self, node: ast.stmt | ast.expr, whole: str) -> None:
        if self._is_private(whole):
            self._note(node, whole)

    def _is_private(self, whole: str) -> bool:
        if whole.split(".")[0] not in ("torch", "functorch") or f"{whole}.".startswith(f"{OPERATORS}."):
            return False
        underscored = [part for part in whole.split(".") if part.startswith("_") and not part.endswith("__")]
        return bool(underscored) or any(f"{whole}.".startswith(f"{module}.") for module in PRIVATE_MODULES)

    def _note(self, node: ast.stmt | ast.expr, what: str) -> None:
        self.found.append((node.lineno, what))


def _text(arguments: list[ast.expr]) -> str:
    return (
        arguments[0].value
        if arguments and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str)
        else ""
    )


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private_name(name: str) -> bool:
    return name in PRIVATE_NAMES or name.startswith(PRIVATE_PREFIXES)


def private_uses(tree: ast.Module) -> list[tuple[int, str]]:
    visitor = _PrivateUses()
    # Names first: a function may use what is imported further down.
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            visitor.visit(node)
    visitor.found.clear()
    visitor.visit(tree)
    return visitor.found


def test_rooms_import_downwards() -> None:
    assert not against_arrows()


def test_every_module_has_a_room() -> None:
    assert {room_of(module) for module in sources()} - {""} == set(LEVEL)


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert not cycles(module_graph())
    assert not cycles(room_graph())
    assert floors(room_graph()) <= len(LAYERS)


def test_files_and_functions_are_short() -> None:
    assert {path for path in long_files()} <= LONGER_FILES, long_files()
    assert {name for name in long_functions()} <= LONGER_FUNCTIONS, long_functions()


def test_private_api_stays_in_graphs() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for module, (path, tree) in sources().items()
        if room_of(module) != "graphs"
        for line, what in private_uses(tree)
    ]
    assert not found


def test_graphs_names_the_private_api_that_it_uses() -> None:
    """In the docstring of the module that uses it, by one of the last two parts of its name."""
    for module, (path, tree) in sources().items():
        text = ast.get_docstring(tree) or ""
        for line, what in private_uses(tree) if room_of(module) == "graphs" else ():
            name = what.split("'")[1] if "'" in what else what
            parts = [part for part in name.split(".") if part][-2:]
            assert any(part in text for part in parts), f"{path.relative_to(ROOT)}:{line} uses {what}"


def test_six_modules_import_inductor() -> None:
    users = {m for m, (_, tree) in sources().items() for _, what in private_uses(tree) if "torch._inductor" in what}
    names = ("apart_kernels", "compilers", "mended_inductor", "planned_order", "realize_less", "share_files")
    assert users == {f"gact_fx.graphs.{name}" for name in names}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._dynamo.reset()",
        "import torch\ntorch.compiler._stance",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch as t\nt._guards",
        "import torch._inductor.config",
        "from torch._inductor import list_options",
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "from torch import _guards",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "from torch.multiprocessing.reductions import StorageWeakRef",
        "from functorch.compile import min_cut_rematerialization_partition",
        "def f():\n    import torch._functorch.config as config",
        "def f(x):\n    return x.untyped_storage()._cdata",
        "def f(x):\n    return x._version",
        "def f(x):\n    return getattr(x, '_opname', '')",
        "def f(x, name):\n    return getattr(x, f'_saved_{name}')",
        "def f(x):\n    x._compiled_call_impl = None",
        "import torch\ntorch.relu = None",
        "from torch import nn\nnn.Module.__call__ = None",
        "from torch import nn\nsetattr(nn.Module, 'forward', None)",
        "import torch\nfunctional = torch.nn.functional\nfunctional.relu = None",
        "import torch\ngetattr(torch, '_dynamo')",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_private_api_is_found(text: str) -> None:
    assert private_uses(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\naten = torch.ops.aten\naten._softmax.default",
        "import torch\ntorch.__version__",
        "class A:\n    def __init__(self):\n        self._x = 1",
        "from gact_fx import _private",
        "import torch\nx = torch.zeros(3)\nx.grad = None",
    ],
)
def test_our_own_names_are_not_taken_for_private_api(text: str) -> None:
    assert not private_uses(ast.parse(text))


if __name__ == "__main__":
    print(f"floors: {floors(room_graph())} of {len(LAYERS)} layers")
    for room, below in room_graph().items():
        print(f"  {room}: {', '.join(sorted(below)) or '-'}")
    print(f"imports against the arrows: {against_arrows() or 'none'}")
    print(f"cycles: {[' -> '.join(cycle) for cycle in cycles(module_graph())] or 'none'}")
    print(f"files over {LONGEST_FILE} lines: {long_files() or 'none'}")
    print(f"functions over {LONGEST_FUNCTION} lines: {long_functions() or 'none'}")
