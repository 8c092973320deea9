"""A planned step of training without data: what it would hold, and how much memory it would need."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import Config
from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.graphs.dynamo import compile_apart, own_call, set_compiled_call
from gact_fx.graphs.fake_steps import Fakes, LiveBytes, run_fake, tensors_in
from gact_fx.graphs.live_memory import peak_nbytes
from gact_fx.graphs.tensors import storage_key
from gact_fx.codec.code import WIDTHS, Code, relative_variance
from gact_fx.training.backend import Backend
from gact_fx.training.model import Target, owned_by
from gact_fx.training.rewrite import RewrittenGraph
from gact_fx.training.session import Session
from gact_fx.planning.graph_profile import GraphProfile
from gact_fx.passes.pipeline import Context
from gact_fx.passes.weigh_plain_cut import weigh_plain_cut


class FakeBackend(Backend):
    def __init__(self, session, meter, *, profiling):
        super().__init__(session, interpreted=profiling)
        self.meter = meter
        self.plain = Counter()
        self.analyses = {}
        self.runs = Counter()

    def rewrite(self, joint: JointGraph) -> RewrittenGraph:
        plain = weigh_plain_cut(joint, Context(self._session.config)) if self._interpreted else 0
        g = super().rewrite(joint)
        if self._interpreted:
            self.analyses[g.plan.fingerprint] = (g.analysis, plain)
        return g

    def run_of(self, graph, is_backward, compile):
        fused = self._session.config.inner == "inductor"
        def run(arguments):
            nodes = graph.graph.find_nodes(op="placeholder")
            keys = [storage_key(x) if isinstance(x, torch.Tensor) else None for x in arguments]
            live = self.meter.live
            with self.meter.paused() as gone:
                outputs = run_fake(graph, arguments)
            freed = [n for n, k in zip(nodes, keys) if k in gone]
            need = peak_nbytes(graph.graph, freed, fused=fused)
            self.meter.peak = max(self.meter.peak, live + need)
            self.meter.add(outputs)
            return outputs
        return boxed(run)

    def watched(self, run, graph, key, is_backward):
        if is_backward and self._interpreted:
            inner = run
            def counted(a):
                self.runs[graph.plan.fingerprint] += 1
                return inner(a)
            run = boxed(counted)
        return super().watched(run, graph, key, is_backward)


def fake_training(model, batch, loss_fn, config):
    import time
    fakes = Fakes()
    m, b = fakes.copy(model), fakes.copy(batch)
    regions = EagerRegions(config.eager_bits, config.seed, config.min_elements, lambda: owned_by(m))
    session = Session(config, "", None, regions, type(model).__name__)
    known = [*m.parameters(), *m.buffers(), *tensors_in(b)]
    meter = LiveBytes(known)
    out = {}
    def step():
        params = [p for p in m.parameters() if p.requires_grad]
        loss = loss_fn(m, b)
        meter.forward, out["held"] = meter.peak, meter.live
        meter.peak = meter.live
        g = torch.autograd.grad(loss, params, allow_unused=True)
        del loss
        out.update(forward=meter.forward, backward=meter.peak, peak=max(meter.forward, meter.peak), left=meter.live)
        del g
    def compile(backend):
        set_compiled_call(m, regions.around(compile_apart(own_call(m, f"estimate_{id(m)}"), backend)))
    t=time.time()
    with fakes:
        back = FakeBackend(session, meter, profiling=True)
        compile(back)
        with meter: step()
    t1=time.time()-t
    session.profiles = {k: GraphProfile(a, plain_nbytes=p, runs=max(back.runs[k],1)) for k,(a,p) in back.analyses.items()}
    from gact_fx.planning.assume_sensitivity import assume_sensitivity
    for pr in session.profiles.values():
        pr.add(pr.analysis, {t.name: assume_sensitivity(t, how) for t, how in pr.analysis.quantized()})
    session.make_plan()
    with fakes:
        compile(FakeBackend(session, meter, profiling=False))
        with meter: step()
        t2=time.time()-t-t1
        meter.peak = meter.live; print("live between", meter.live)
        with meter: step()
    t3=time.time()-t-t1-t2
    from gact_fx.diagnostics.report import Report
    r = Report.from_session(session, m)
    out.update(before=r.bytes_before, after=r.bytes_after, plain=sum(p for _, p in back.analyses.values()), t=[round(x,1) for x in (t1,t2,t3)])
    return out
