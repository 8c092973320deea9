"""Whether the compilers that Inductor calls work, which is found out in a process with an empty cache."""

import os
import re
import subprocess
import sys
import tempfile

_ERROR = re.compile(r"^[\w.]*(?:Error|Exception): .*$", re.MULTILINE)
_TRIAL = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(64))"


def compilation_failure(timeout: float = 300.0) -> str:
    """Compile a small function for the CPU in a new process: '' if that works, else the first line of its error."""
    with tempfile.TemporaryDirectory(prefix="gact_fx_doctor_") as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _TRIAL], env=environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return f"it took more than {timeout:.0f} seconds"
    if done.returncode == 0:
        return ""
    # Behind the traceback stands the exception, and what the compiler wrote behind that.
    found = _ERROR.search(done.stderr)
    return found[0] if found else f"the process ended with {done.returncode}"
