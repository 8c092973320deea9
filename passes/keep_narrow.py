"""Keep across backward's peak what a tensor was cast from, where that takes fewer bytes.

Under autocast a normalization computes its gradient in 32 bits of one that arrives in 16, and reads it in several
loops. The compiler may keep the gradient in 32 bits for all of these loops. Where the gradient in 16 bits is in memory,
each loop casts what it reads, and the wider gradient is never in memory.
"""

from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.operator_table import CASTS
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.backward_peak import Look, make_before


def keep_narrow(look: Look) -> bool:
    """Edit the graph in place; returns whether a wider tensor waited at the peak for calls behind it."""
    for span in look.live:
        if span.start < look.peak < span.end and packet_of(span.node) in CASTS and span.node in look.depends:
            (source,) = span.node.all_input_nodes
            is_narrower = source in look.life.inlined and nbytes(source) < span.nbytes
            if is_narrower and make_before(look, source, span.start):
                return True
    return False
