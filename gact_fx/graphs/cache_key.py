"""What tells compiled graphs of one version of gact_fx from those of another in Inductor's cache."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def sources_key() -> str:
    """A hash of the sources that say how graphs are compiled, and what gact_fx's operators return.

    Inductor's own key has the graph, and of an operator the name alone.
    """
    package = Path(__file__).parents[1]
    files = sorted(file for folder in ("graphs", "codec") for file in (package / folder).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
