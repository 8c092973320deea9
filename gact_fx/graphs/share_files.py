"""Have Inductor compile many CPU kernels in one C++ file, because each call of the C++ compiler costs half a second.

Inductor gives each kernel a file of its own. A ResNet-50 with a function for each large loop (`apart_kernels`) has 140
kernels, whose compilation was more than a third of the time to the first planned step. Most of a compiler's call goes
into the headers in front of the kernel and the linker behind it. Here the kernels of a graph are dealt to a few files
of about equal length, two for each of Inductor's workers. That takes 50 seconds of the 147 away.

The generated Python code stays as it is, so that Inductor's cache of graphs can load it with and without this module.

Private, tried with torch 2.11 and 2.13: ``AsyncCompile.cpp_pybinding`` and ``AsyncCompile.wait``, which are replaced,
with ``submit`` and ``get_compile_threads``; ``codecache.LambdaFuture``; ``codecache.CppPythonBindingsCodeCache`` with
``load_pybinding``, ``load_pybinding_async``, ``call_entry_function`` and ``extra_parse_arg``, which a subclass sets.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gact_fx.graphs.mended_inductor import replaced_in

# One kernel and nothing else at the level of its file, such as a template's helpers, which two kernels may both have.
_ALONE = re.compile(
    r'\s*#include <torch/csrc/inductor/cpp_prefix\.h>\s*extern "C"\s+void\s+kernel(\([^{}#]*\)\s*\{.*)', re.DOTALL
)
_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_FILES_PER_WORKER = 2

_BINDING = """
static PyObject* kernel_{index}_py(PyObject*, PyObject* args) {{
    try {{
        if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != {count})
            throw std::runtime_error("kernel_{index} takes {count} arguments");
        kernel_{index}({arguments});
        Py_RETURN_NONE;
    }} catch (std::exception const& error) {{
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }}
    return nullptr;
}}
"""
_ALL_BINDINGS = """
static PyMethodDef kernel_methods[] = {{{methods}}};
static PyObject* all_kernels() {{
    PyObject* kernels = PyTuple_New({count});
    for (Py_ssize_t i = 0; kernels && i < {count}; ++i) {{
        PyObject* kernel = PyCFunction_New(&kernel_methods[i], nullptr);
        if (!kernel) {{
            Py_CLEAR(kernels);
            break;
        }}
        PyTuple_SET_ITEM(kernels, i, kernel);
    }}
    return kernels;
}}
"""


@dataclass(frozen=True)
class Kernel:
    """The C++ types of a kernel's arguments, and its code from the list of arguments on."""

    argtypes: tuple[str, ...]
    code: str

    @staticmethod
    def of(argtypes: Sequence[str], source: str) -> "Kernel | None":
        """None for source code that has more in it than one kernel, which keeps a file of its own."""
        alone = _ALONE.fullmatch(source)
        if alone is None or any(word in alone[1] for word in ("#include", "#define", 'extern "C"')):
            return None
        return Kernel(tuple(argtypes), alone[1])


@contextlib.contextmanager
def shared_files() -> Iterator[None]:
    """Compile in this context; what is replaced in Inductor is put back behind it."""
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    bind, usual_wait = compiler.cpp_pybinding, compiler.wait

    def cpp_pybinding(self: Any, argtypes: Sequence[str], source_code: str) -> Any:
        return Kernel.of(argtypes, source_code) or bind(self, argtypes, source_code)

    def wait(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: kernel for name, kernel in scope.items() if isinstance(kernel, Kernel)}
        scope.update(_compile(kernels, self.submit))
        usual_wait(self, scope)

    with replaced_in(compiler, "cpp_pybinding", cpp_pybinding), replaced_in(compiler, "wait", wait):
        yield


def deal(lengths: Mapping[str, int], count: int) -> list[list[str]]:
    """At most ``count`` lists of about equal length in sum: the longest first, each to the shortest list so far."""
    files: list[list[str]] = [[] for _ in range(min(count, len(lengths)))]
    for name in sorted(lengths, key=lambda name: -lengths[name]):
        min(files, key=lambda names: sum(lengths[name] for name in names)).append(name)
    return files


def _compile(kernels: Mapping[str, Kernel], submit: Callable[..., Any]) -> dict[str, Any]:
    """What Inductor's ``cpp_pybinding`` gives for each: a function, or a future of it where Inductor has workers."""
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import LambdaFuture

    workers = get_compile_threads()
    compiled: dict[str, Any] = {}
    for names in deal({name: len(kernel.code) for name, kernel in kernels.items()}, _FILES_PER_WORKER * workers):
        bindings, source = _write([kernels[name] for name in names])
        if workers <= 1:
            compiled.update(zip(names, bindings.load_pybinding([], source)(), strict=True))
            continue
        load = bindings.load_pybinding_async([], source, submit_fn=submit)
        functions = functools.cache(functools.partial(_call, load))
        for i, name in enumerate(names):
            compiled[name] = LambdaFuture(functools.partial(_item, functions, i))
    return compiled


def _call(load: Callable[[], Callable[[], Any]]) -> Any:
    return load()()


def _item(functions: Callable[[], Sequence[Any]], index: int) -> Any:
    return functions()[index]


def _write(kernels: Sequence[Kernel]) -> tuple[Any, str]:
    """A class that binds all these kernels to Python at once, and the code of their file."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    source = _PREFIX + "".join(f"static void kernel_{i}{kernel.code}\n" for i, kernel in enumerate(kernels))
    functions = [_bind(i, kernel.argtypes) for i, kernel in enumerate(kernels)]
    methods = ", ".join(f'{{"kernel_{i}", kernel_{i}_py, METH_VARARGS, ""}}' for i in range(len(kernels)))
    functions.append(_ALL_BINDINGS.format(methods=methods, count=len(kernels)))
    # Both are templates of Inductor's, which it formats: braces are doubled.
    attributes = {
        "extra_parse_arg": "".join(functions).replace("{", "{{").replace("}", "}}"),
        "call_entry_function": "return all_kernels();",
    }
    return type("SharedFile", (CppPythonBindingsCodeCache,), attributes), source


def _bind(index: int, argtypes: Sequence[str]) -> str:
    plain = [argtype.replace("const ", "") for argtype in argtypes]
    arguments = ", ".join(f"parse_arg<{argtype}>(args, {n})" for n, argtype in enumerate(plain))
    return _BINDING.format(index=index, count=len(plain), arguments=arguments)
