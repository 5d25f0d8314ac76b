"""What becomes of a plan's problems: errors stop, the rest is said as warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from bitwright.errors import ConfigMatchWarning, PlanError

from .plan import Problem, Severity

__all__ = ["report_problems"]

_logger = logging.getLogger(__name__)
_logger.addHandler(logging.NullHandler())


def report_problems(problems: Sequence[Problem], strict: bool, stacklevel: int = 3) -> None:
    """Raise one error that lists all fatal problems, or warn about each problem.

    Args:
        problems: of a plan.
        strict: whether warnings are fatal too.
        stacklevel: frames between the caller of the public method and this function, plus one.

    Raises:
        PlanError: at least one problem is fatal.
    """
    fatal = [problem for problem in problems if strict or problem.severity == Severity.ERROR]
    if fatal:
        listed = "\n".join(f"  {problem}" for problem in fatal)
        raise PlanError(f"The configuration cannot be applied; {len(fatal)} problem(s):\n{listed}", tuple(fatal))
    for problem in problems:
        _logger.warning("%s", problem)  # for services that collect logs; the handler of its own is silent
        warnings.warn(str(problem), ConfigMatchWarning, stacklevel=stacklevel)
