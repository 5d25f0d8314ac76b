"""Base class of the factories that build simulators from specs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .compression_spec import CompressionSpec
from .target import CompressionTargetTensor

__all__ = ["CompressionComponentFactoryBase"]


class CompressionComponentFactoryBase(ABC):
    """Builds the simulator that a spec describes."""

    @classmethod
    @abstractmethod
    def construct(cls, spec: CompressionSpec, target: CompressionTargetTensor) -> Any:
        """Return a new simulator for ``spec`` on a tensor of kind ``target``."""

    @classmethod
    @abstractmethod
    def construct_partial(cls, spec: CompressionSpec | None, target: CompressionTargetTensor) -> Any:
        """Return a constructor that builds the simulator when called; None for a None spec."""
