"""Parts of annotation patterns, under the names that coreai-opt keeps here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from bitwright.program.aten_names import aten_name

__all__ = ["OpsListPattern"]


@dataclass(frozen=True, slots=True)
class OpsListPattern:
    """Ops that follow each other, each the only reader of the one before.

    Attributes:
        pattern: for each op its name (``"relu"``), an ATen op, or the function that calls it.
    """

    pattern: Sequence[str | Callable[..., object]] = field(default_factory=list)

    def names(self) -> tuple[str, ...]:
        """Return the names of the ops."""
        return tuple(entry if isinstance(entry, str) else aten_name(entry) for entry in self.pattern)


def _is_fx_node_floating_point(node: fx.Node) -> bool:
    """Return whether a node's value is a tensor of floating-point numbers, as far as the capture knows."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
