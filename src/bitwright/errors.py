"""Errors and warnings that Bitwright raises on its own account.

Every message says what was wrong, where, and what to do. Standard types (``ValueError``, ``TypeError``,
``RuntimeError``) are the bases, so that code written for coreai-opt keeps catching what it caught.
"""

from __future__ import annotations

__all__ = [
    "BitwrightError",
    "BitwrightWarning",
    "CalibrationWarning",
    "ConfigMatchWarning",
    "PlanError",
    "TraceError",
    "UnplannedCallWarning",
]


class BitwrightError(Exception):
    """Base of the errors that only Bitwright raises."""


class PlanError(BitwrightError, ValueError, RuntimeError):
    """The configuration cannot be applied to this model; lists every problem found, not only the first.

    coreai-opt raises ``ValueError`` for some of these problems and ``RuntimeError`` for others.
    """

    def __init__(self, message: str, problems: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class TraceError(BitwrightError, RuntimeError):
    """The model cannot be traced: its own forward fails on the inputs, or ``torch.export`` cannot capture it."""


class BitwrightWarning(UserWarning):
    """Base of the warnings that Bitwright emits."""


class CalibrationWarning(BitwrightWarning):
    """Activation ranges are about to be used that no calibration data made."""


class ConfigMatchWarning(BitwrightWarning):
    """A part of the configuration matches nothing, or cannot be applied to a tensor that it names."""


class UnplannedCallWarning(BitwrightWarning):
    """A call ran that was not seen while planning; it passed through uncompressed."""
