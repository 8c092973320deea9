"""The error of an argument that cannot be used, and how errors are quoted in messages; from `gact_fx.errors`."""

from gact_fx.errors import UsageError as UsageError
from gact_fx.errors import first_line as first_line
