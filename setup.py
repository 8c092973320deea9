"""Build the optional extension ``gact_fx._C``; everything else about the package stands in pyproject.toml.

GACT_FX_NO_EXT=1 builds without the extension: the operators then run as PyTorch code.
"""

import glob
import os
import sys
from typing import Any

from setuptools import setup


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
            # at::parallel_for needs it. It is not given to the linker, so that the symbols come from the OpenMP
            # runtime that libtorch_cpu loads: a second runtime would bring a second pool of threads.
            cxx.append("-fopenmp")
    flags = {"cxx": cxx}
    sources = ["csrc/bindings.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))]
    cuda_sources = sorted(glob.glob("csrc/cuda/*.cu"))
    extension: Any = cpp_extension.CppExtension
    if cuda_sources and torch.version.cuda and cpp_extension.CUDA_HOME:
        extension = cpp_extension.CUDAExtension
        sources += cuda_sources
        flags["cxx"] = [*cxx, "-DGACT_WITH_CUDA"]
        flags["nvcc"] = ["-O3", "--fmad=false", "-DGACT_WITH_CUDA"]
    module = extension(
        "gact_fx._C", sources, depends=glob.glob("csrc/**/*.h", recursive=True), extra_compile_args=flags
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": cpp_extension.BuildExtension}}


setup(
    name="gact_fx",
    packages=["gact_fx", "gact_fx.passes"],
    package_dir={"gact_fx": "gact_fx", "gact_fx.passes": "passes"},
    **extension_arguments(),
)
