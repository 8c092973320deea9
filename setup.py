"""Build the optional library of kernels, ``gact_fx/libgact_fx.so``; all else about the package is in pyproject.toml.

The library uses PyTorch's stable ABI of torch 2.11 and nothing of Python. So one wheel serves every Python, and every
torch from 2.11 on, whichever it was built with.

GACT_FX_NO_EXT=1 builds without the library: the operators then run as PyTorch code. GACT_FX_NO_CUDA=1 builds the CPU's
kernels alone, as wheels must: a library with CUDA kernels loads beside a torch with CUDA alone. GACT_FX_SANITIZE=1
builds the CPU's kernels under AddressSanitizer and UndefinedBehaviorSanitizer (``make sanitize``).
"""

import glob
import os
import re
import subprocess
import sys
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

ROOMS = ("integrations", "diagnostics", "training", "profiling", "planning", "breaks", "graphs", "codec")


def can_build_cuda() -> bool:
    """Whether CUDA kernels are wanted, and nvcc is of the same major version as torch's CUDA; says so if it is not."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    wanted = torch.version.cuda
    if not wanted or not CUDA_HOME or os.environ.get("GACT_FX_NO_CUDA") == "1":
        return False
    nvcc = os.path.join(CUDA_HOME, "bin", "nvcc")
    try:
        found = re.search(r"release (\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    except OSError:
        found = None
    if found and found.group(1) == wanted.split(".")[0]:
        return True
    version = f"CUDA {found.group(1)}" if found else "unusable"
    print(f"gact_fx: building without CUDA kernels: torch is for CUDA {wanted}, {nvcc} is {version}", file=sys.stderr)
    return False


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3, since the library in it knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its ABI and the platform."""
        return "py3", "none", super().get_tag()[2]


def extension_arguments() -> dict[str, Any]:
    """Return setup()'s arguments for the library: with CUDA if torch and nvcc have it, else for the CPU alone."""
    if os.environ.get("GACT_FX_NO_EXT") == "1":
        return {}
    from torch.utils import cpp_extension

    target = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # 2.11
    if sys.platform == "win32":
        cxx = ["/O2", "/fp:precise", *target]
    else:
        # No -march=native: the kernels choose their instruction set at run time. No contraction: see csrc/codec.h.
        cxx = ["-O3", "-g0", "-ffp-contract=off", "-fno-trapping-math", "-fvisibility=hidden", *target]
        if sys.platform == "linux" and "clang" not in os.environ.get("CXX", ""):
            # GCC 12 takes the undefined operands inside its own AVX-512 intrinsics for our mistakes.
            cxx += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    link: list[str] = []
    if os.environ.get("GACT_FX_SANITIZE") == "1":
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        cxx += ["-O1", "-g", "-fno-omit-frame-pointer", *sanitizers]
        link += sanitizers
    flags = {"cxx": cxx}
    sources = ["csrc/operators.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))]
    extension: Any = cpp_extension.CppExtension
    if can_build_cuda():
        extension = cpp_extension.CUDAExtension
        sources += sorted(glob.glob("csrc/cuda/*.cu"))
        flags["cxx"] = [*cxx, "-DUSE_CUDA"]  # the name that the stable ABI's headers read
        flags["nvcc"] = ["-O3", "--fmad=false"]
        # Every card that torch runs on, newer ones by way of PTX; compiling takes a minute.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "7.5;8.0;8.6;8.9;9.0+PTX")
    headers = [*glob.glob("csrc/**/*.h", recursive=True), *glob.glob("csrc/cuda/*.cuh")]
    library = extension(
        "gact_fx.libgact_fx",
        sources,
        depends=headers,
        extra_compile_args=flags,
        extra_link_args=link,
        py_limited_api=True,  # leaves out libtorch_python, which belongs to one Python
    )
    build = cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)
    return {"ext_modules": [library], "cmdclass": {"build_ext": build, "bdist_wheel": PlatformWheel}}


setup(
    name="gact_fx",
    packages=["gact_fx", *(f"gact_fx.{room}" for room in ROOMS), "gact_fx.passes"],
    package_dir={"gact_fx": "gact_fx", "gact_fx.passes": "passes"},
    package_data={"gact_fx": ["py.typed"]},
    **extension_arguments(),
)
