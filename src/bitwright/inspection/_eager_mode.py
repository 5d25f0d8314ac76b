"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitwright._utils.insertion.torch_function.module_boundary_tracker import TensorIdVersion

from .types import InputEdge, OpInfo

__all__: list[str] = []


class _EagerOpDiscoveryMode:
    """Remembers which op made a tensor for as long as the tensor lives."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensor_producers: dict[TensorIdVersion, InputEdge] = {}

    def _record_outputs(self, outputs: Any, op: OpInfo) -> None:
        for index, leaf in enumerate(tree_leaves(outputs)):
            if isinstance(leaf, torch.Tensor):
                key = TensorIdVersion(id(leaf), leaf._version)
                self._tensor_producers[key] = InputEdge(op=op, output_idx=index)
                weakref.finalize(leaf, self._tensor_producers.pop, key, None)
