"""gact_fx: train in a fraction of the activation memory.

A torch.compile pass that stores what forward keeps for backward in a few bits per element (GACT, ICML 2022):

    import gact_fx
    model = gact_fx.compile(model, budget_bits=4)
"""

import logging

from gact_fx import ops as ops
from gact_fx.api import compile as compile
from gact_fx.api import estimate as estimate
from gact_fx.api import inspect as inspect
from gact_fx.api import uncompile as uncompile
from gact_fx.config import Config as Config
from gact_fx.diagnostics.estimate import Estimate as Estimate
from gact_fx.diagnostics.gradient_error import GradientError as GradientError
from gact_fx.diagnostics.measure_gradient_error import measure_gradient_error as measure_gradient_error
from gact_fx.diagnostics.measure_peak import measure_peak as measure_peak
from gact_fx.diagnostics.report import Report as Report
from gact_fx.errors import GactError as GactError
from gact_fx.plan import Plan as Plan
from gact_fx.training.progress import LastResort as _LastResort

logging.getLogger("gact_fx").addHandler(_LastResort())

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Estimate",
    "GactError",
    "GradientError",
    "Plan",
    "Report",
    "compile",
    "estimate",
    "inspect",
    "measure_gradient_error",
    "measure_peak",
    "ops",
    "uncompile",
]
