"""The translations that take the place of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .angles import angle_of_point
from .attention import attention
from .bools import EXTREMES, WHERE, add, extreme, where
from .convolutions import convolution
from .embedding_bags import embedding_bag
from .indexing import SCATTERS, WRITES, indexed_write, masked_select, scatter_to_places, scattered
from .integers import (
    PLACES,
    PREDICATES,
    ROUNDINGS,
    place_of_extreme,
    predicate,
    product_by_index,
    rounding,
    times_power_of_two,
)
from .losses import cross_entropy
from .matrix_sums import SUMS, added_product
from .norms import batch_norm
from .pools import MAXIMA, average_pool, max_pool
from .recurrent import lstm
from .resizing import ANTIALIASED, antialiased
from .shapes import SIZES, SQUEEZES
from .shifts import SHIFTS, shift
from .sorts import sort_stably
from .torchlib import torchs_translation

__all__ = ["translations"]


def translations(opset: int | None) -> dict[Any, Callable[..., Any]]:
    """Return Bitwright's translations by overload, for ``torch.onnx.export``.

    Args:
        opset: version of the operator set; None for torch's choice.
    """
    aten = torch.ops.aten
    return {
        aten._is_all_true.default: torchs_translation(aten.all.default, opset),
        aten._is_any_true.default: torchs_translation(aten.any.default, opset),
        aten._native_batch_norm_legit_functional.default: batch_norm(opset),
        aten.add.Tensor: add(opset),
        aten.atan2.default: angle_of_point,
        aten.avg_pool2d.default: average_pool(aten.avg_pool2d.default, 2, opset),
        aten.avg_pool3d.default: average_pool(aten.avg_pool3d.default, 3, opset),
        aten.convolution.default: convolution(opset),
        aten.cross_entropy_loss.default: cross_entropy(opset),
        aten.einsum.default: product_by_index(opset),
        aten.embedding_bag.padding_idx: embedding_bag,
        aten.ldexp.Tensor: times_power_of_two,
        aten.lstm.input: lstm(opset),
        aten.scatter_reduce.two: scattered(opset),
        aten.sort.stable: sort_stably(opset),
        aten.scaled_dot_product_attention.default: attention(opset),
        aten.masked_select.default: masked_select,
        **SIZES,
        **SQUEEZES,
        **{overload: max_pool(overload, opset) for overload in MAXIMA},
        **{overload: antialiased(overload, opset) for overload in ANTIALIASED},
        **{overload: scatter_to_places(overload, opset) for overload in SCATTERS},
        **{overload: indexed_write(overload, opset) for overload in WRITES},
        **{overload: where(overload, opset) for overload in WHERE},
        **{overload: extreme(overload, opset) for overload in EXTREMES},
        **{overload: rounding(overload, opset) for overload in ROUNDINGS},
        **{overload: predicate(overload, opset) for overload in PREDICATES},
        **{overload: place_of_extreme(overload, opset) for overload in PLACES},
        **{overload: added_product(overload, opset) for overload in SUMS},
        **{overload: shift(direction) for overload, direction in SHIFTS.items()},
    }
