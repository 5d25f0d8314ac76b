"""What the two execution modes do in their own way; the life cycle around them stands once, in ``quantizer.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bitwright.common import ExportBackend
from bitwright.planning import Placement, Plan
from bitwright.program import Program
from bitwright.quantization.config import QuantizerConfig

__all__ = ["Engine", "ExampleInputs"]


@dataclass(frozen=True, slots=True)
class ExampleInputs:
    """How to call the model while it is planned and prepared.

    Attributes:
        args: positional inputs.
        kwargs: keyword inputs.
        dynamic_shapes: passed on to ``torch.export`` in graph mode.
        no_grad: whether graph mode exports under ``no_grad``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    no_grad: bool = True


class Engine(ABC):
    """One execution mode: plan, insert, finalize.

    Attributes:
        program: the program of the last plan.
    """

    program: Program

    def __init__(self, model: nn.Module, config: QuantizerConfig) -> None:
        self.model = model
        self.config = config

    @abstractmethod
    def plan(self, example: ExampleInputs) -> Plan:
        """Return the plan; the model is not changed."""

    @abstractmethod
    def insert(self, example: ExampleInputs, plan: Plan, complete: Callable[[nn.Module], None]) -> nn.Module:
        """Insert the simulators of ``plan`` and initialise them; return the prepared model.

        On an error the user's model is as it was, also on one of ``complete``, which is called with the prepared model
        at the end.
        """

    def folded(self) -> nn.Module | None:
        """Return the last ``plan``'s model without the batch norms that ``insert`` folds; None if it folds none."""
        return None

    @abstractmethod
    def module_paths(self) -> Mapping[str, str]:
        """Return, by simulator name in the prepared model, the module whose configuration decided."""

    def served_by(self, placement: Placement) -> tuple[str, ...]:
        """Return the modules that a planned simulator serves."""
        return (placement.module_path,)

    def owners_of(self, name: str) -> tuple[str, ...]:
        """Return the modules that a simulator serves, by its name in the prepared model."""
        return (self.module_paths()[name],)

    @abstractmethod
    def simulators_of(self, model: nn.Module, path: str) -> list[Any]:
        """Return the simulators of ``model`` that belong to the original module at ``path`` or below."""

    @abstractmethod
    def finalize(self, model: nn.Module, backend: ExportBackend, mmap_dir: str | None) -> nn.Module:
        """Return ``model`` in the form that ``backend`` takes."""
