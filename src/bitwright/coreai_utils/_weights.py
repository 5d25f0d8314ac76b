"""Which constants of a program are weights, and which of their axes are channels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from bitwright.errors import ConfigMatchWarning

from ._ir import Constant, Emit, Use, float_constants, integers_of, replace_constant, uses_of, verify

#: From this size on a constant is a weight whoever reads it.
_SURELY_A_WEIGHT: Final = 100_000_000

_MATMULS: Final = frozenset({"coreai.batch_matmul", "coreai.decomposable.broadcasting_batch_matmul"})
_OUT_FIRST: Final = frozenset({"coreai.conv2d", "coreai.conv3d", "coreai.gather_nd"})
_IN_FIRST: Final = frozenset({"coreai.conv_transpose2d", "coreai.conv_transpose3d"})
_TRANSPOSE: Final = "coreai.transpose"
_CONSUMERS: Final = _MATMULS | _OUT_FIRST | _IN_FIRST | {_TRANSPOSE}


@dataclass(frozen=True)
class Weight:
    """A weight of a program.

    Attributes:
        constant: where it stands.
        values: its values in float32.
        out_axis: axis of the output channels.
        in_axis: axis of the input channels.
    """

    constant: Constant
    values: torch.Tensor
    out_axis: int
    in_axis: int

    @property
    def element_type(self) -> str:
        """MLIR element type that the decoded weight has to have."""
        return self.constant.element_type

    def along(self, axis: int, size: int) -> tuple[int, ...]:
        """Return a shape of the weight's rank with ``size`` at ``axis`` and ones elsewhere."""
        return tuple(size if i == axis else 1 for i in range(self.values.dim()))

    def __str__(self) -> str:
        return str(self.constant)


class Skipped(Exception):
    """A weight to which the request does not apply; the text says why."""


def compress_weights(program: Any, threshold: int, compress: Callable[[Weight], Emit]) -> Any:
    """Replace every weight with more than ``threshold`` elements by what ``compress`` makes of it.

    One weight at a time, so that a large program needs the memory of its largest weight only. Weights that the request
    does not fit are left as they are; one warning names them all. Another says that there was none.
    """
    replaced = 0
    skipped: list[str] = []
    for constant in float_constants(program):
        if not _is_weight(constant, threshold):
            continue
        out_axis, in_axis = _channel_axes(constant)
        try:
            weight = Weight(constant, _finite(constant), out_axis, in_axis)
            replace_constant(constant, compress(weight))
            replaced += 1
        except Skipped as reason:
            skipped.append(f"{constant}: {reason}")
    verify(program)
    if not replaced and not skipped:
        warnings.warn(
            f"Nothing was compressed: the program has no float constant of more than {threshold} elements that only "
            "matrix products, convolutions, gathers and transposes read. What an earlier pass compressed stays as it "
            "is; for a mask with codes or a palette, use quantize_dtype or palettize_nbits of sparsify_weights.",
            ConfigMatchWarning,
            stacklevel=3,
        )
    if skipped:
        warnings.warn(
            f"{len(skipped)} of {len(skipped) + replaced} weights were left as they are. " + "; ".join(skipped),
            ConfigMatchWarning,
            stacklevel=3,
        )
    return program


def _finite(constant: Constant) -> torch.Tensor:
    values = constant.read().float()
    broken = int((~values.isfinite()).sum())
    if broken:
        raise Skipped(f"it holds {broken} values that are NaN or infinite")
    return values


def _is_weight(constant: Constant, threshold: int) -> bool:
    uses = constant.uses
    if not uses or constant.size <= threshold or not constant.shape:
        return False
    return constant.size >= _SURELY_A_WEIGHT or all(use.name in _CONSUMERS for use in uses)


def _channel_axes(constant: Constant) -> tuple[int, int]:
    """Return the axes of output and input channels; (0, 1) when nobody tells, or readers disagree (with a warning)."""
    rank = len(constant.shape)
    axes = {pair for use in constant.uses for pair in _axes_for(use, rank)}
    if len(axes) == 1:
        return axes.pop()
    if axes:
        warnings.warn(
            f"The {constant} has output and input channels on the axes {sorted(axes)} for different readers; "
            "axis 0 is taken for the output and axis 1 for the input.",
            ConfigMatchWarning,
            stacklevel=4,
        )
    return 0, min(1, rank - 1)


def _axes_for(use: Use, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the (output, input) axes that a reader of a tensor of ``rank`` axes sees."""
    if use.name in _MATMULS and rank >= 2:
        yield (rank - 2, rank - 1) if use.position == 0 else (rank - 1, rank - 2)
    elif use.name in _OUT_FIRST:
        yield 0, min(1, rank - 1)
    elif use.name in _IN_FIRST:
        yield 1, 0
    elif use.name == _TRANSPOSE:
        order = integers_of(use.operation.operands[1])
        if order is not None and len(order) == rank:
            for reader in uses_of(use.operation):
                for out_axis, in_axis in _axes_for(reader, rank):
                    yield order[out_axis], order[in_axis]
