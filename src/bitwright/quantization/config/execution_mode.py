"""How a model is captured for quantization."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

from bitwright.common import _DeprecatedMemberEnumMeta

__all__ = ["ExecutionMode", "InvalidExecutionModeError"]


class ExecutionMode(enum.StrEnum, metaclass=_DeprecatedMemberEnumMeta):
    """The front end that reads the model. Values are strings, so ``execution_mode="eager"`` works too.

    Attributes:
        GRAPH: ``torch.export`` captures the model; needs a model that can be exported.
        EAGER: one traced forward, and the model keeps running as Python code; control flow may vary.

    ``PT2E`` is the deprecated name of ``GRAPH``.
    """

    __deprecated_aliases__: ClassVar[dict[str, str]] = {"PT2E": "GRAPH"}

    GRAPH = "graph"
    EAGER = "eager"

    if TYPE_CHECKING:
        PT2E: ExecutionMode


class InvalidExecutionModeError(ValueError):
    """A quantizer was asked for an execution mode that does not exist."""

    def __init__(self, execution_mode: object) -> None:
        choices = " or ".join(repr(mode.value) for mode in ExecutionMode)
        super().__init__(f"Unknown execution_mode {execution_mode}. Expected {choices}.")
