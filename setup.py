"""Build the optional extension ``gact_fx._C``; everything else about the package stands in pyproject.toml.

GACT_FX_NO_EXT=1 builds without the extension: the operators then run as PyTorch code. GACT_FX_SANITIZE=1 builds the
CPU's kernels under AddressSanitizer and UndefinedBehaviorSanitizer (``make sanitize``).
"""

import glob
import os
import re
import subprocess
import sys
from typing import Any

from setuptools import setup

ROOMS = ("integrations", "diagnostics", "training", "profiling", "planning", "breaks", "graphs", "codec")


def nvcc_fits(wanted: str) -> bool:
    """Whether nvcc is of the same major version as torch's CUDA, which the build demands; says so if it is not."""
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = os.path.join(str(CUDA_HOME), "bin", "nvcc")
    try:
        found = re.search(r"release (\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    except OSError:
        found = None
    if found and found.group(1) == wanted.split(".")[0]:
        return True
    version = f"CUDA {found.group(1)}" if found else "unusable"
    print(f"gact_fx: building without CUDA kernels: torch is for CUDA {wanted}, {nvcc} is {version}", file=sys.stderr)
    return False


def extension_arguments() -> dict[str, Any]:
    """Return setup()'s arguments for the extension: with CUDA if torch, nvcc and the sources have it, else CPU only."""
    if os.environ.get("GACT_FX_NO_EXT") == "1":
        return {}
    import torch
    from torch.utils import cpp_extension

    if sys.platform == "win32":
        cxx = ["/O2", "/fp:precise", "/openmp"]
    else:
        # No -march=native: the kernels choose their instruction set at run time. No contraction: see csrc/codec.h.
        cxx = ["-O3", "-g0", "-ffp-contract=off", "-fno-trapping-math"]
        if sys.platform == "linux" and "clang" not in os.environ.get("CXX", ""):
            # GCC 12 takes the undefined operands inside its own AVX-512 intrinsics for our mistakes.
            cxx.append("-Wno-maybe-uninitialized")
            # at::parallel_for needs it. It is not given to the linker, so that the symbols come from the OpenMP
            # runtime that libtorch_cpu loads: a second runtime would bring a second pool of threads.
            cxx.append("-fopenmp")
        else:
            print(
                "gact_fx: this compiler builds the CPU kernels for one thread; GCC builds them for all", file=sys.stderr
            )
    link: list[str] = []
    if os.environ.get("GACT_FX_SANITIZE") == "1":
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        cxx += ["-O1", "-g", "-fno-omit-frame-pointer", *sanitizers]
        link += sanitizers
    flags = {"cxx": cxx}
    sources = ["csrc/bindings.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))]
    cuda_sources = sorted(glob.glob("csrc/cuda/*.cu"))
    extension: Any = cpp_extension.CppExtension
    if cuda_sources and torch.version.cuda and cpp_extension.CUDA_HOME and nvcc_fits(torch.version.cuda):
        extension = cpp_extension.CUDAExtension
        sources += cuda_sources
        flags["cxx"] = [*cxx, "-DGACT_WITH_CUDA"]
        flags["nvcc"] = ["-O3", "--fmad=false"]
        # Every card that torch runs on, newer ones by way of PTX; compiling takes a minute.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "7.5;8.0;8.6;8.9;9.0+PTX")
    headers = [*glob.glob("csrc/**/*.h", recursive=True), *glob.glob("csrc/cuda/*.cuh")]
    module = extension("gact_fx._C", sources, depends=headers, extra_compile_args=flags, extra_link_args=link)
    return {"ext_modules": [module], "cmdclass": {"build_ext": cpp_extension.BuildExtension}}


setup(
    name="gact_fx",
    packages=["gact_fx", *(f"gact_fx.{room}" for room in ROOMS), "gact_fx.passes"],
    package_dir={"gact_fx": "gact_fx", "gact_fx.passes": "passes"},
    package_data={"gact_fx": ["py.typed"]},
    **extension_arguments(),
)
