"""The operators that users may call themselves, and whether there are kernels for them."""

from gact_fx.codec.operators import compress as compress
from gact_fx.codec.operators import decompress as decompress
from gact_fx.codec.operators import has_compiled_kernels as has_compiled_kernels

__all__ = ["compress", "decompress", "has_compiled_kernels"]
