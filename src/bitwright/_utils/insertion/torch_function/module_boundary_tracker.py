"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TensorIdVersion"]


class TensorIdVersion(NamedTuple):
    """Identity of a tensor's content: ``id`` and version counter."""

    tensor_id: int
    version: int
