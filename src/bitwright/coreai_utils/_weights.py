"""Which constants of a program are weights, and which of their axes are channels."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from bitwright.errors import ConfigMatchWarning

from ._ir import Constant, Emit, Use, float_constants, integers_of, replace_constant, shape_of, uses_of, verify

_logger = logging.getLogger("bitwright.coreai_utils")

#: From this size on a constant is a weight whoever reads it.
_SURELY_A_WEIGHT: Final = 100_000_000

_MATMULS: Final = frozenset({"coreai.batch_matmul", "coreai.decomposable.broadcasting_batch_matmul"})
_OUT_FIRST: Final = frozenset({"coreai.conv2d", "coreai.conv3d", "coreai.gather_nd"})
_IN_FIRST: Final = frozenset({"coreai.conv_transpose2d", "coreai.conv_transpose3d"})
_TRANSPOSE: Final = "coreai.transpose"
_RESHAPE: Final = "coreai.reshape"
CONSUMERS: Final = _MATMULS | _OUT_FIRST | _IN_FIRST | {_TRANSPOSE}

#: What an axis of a weight is to a reader; kernel axes are none of these.
_OUT, _IN, _BATCH, _OTHER = "output", "input", "batch", ""
_Roles = tuple[str, ...]


@dataclass(frozen=True)
class Weight:
    """A weight of a program.

    Attributes:
        constant: where it stands.
        values: its values in float32.
        out_axis: axis of the output channels.
        in_axis: axis of the input channels.
        batch_axes: axes along which matrices are stacked, those of the experts of a batched product for example.
    """

    constant: Constant
    values: torch.Tensor
    out_axis: int
    in_axis: int
    batch_axes: tuple[int, ...] = ()

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
    others: list[str] = []
    for constant in float_constants(program):
        if constant.size <= threshold or not constant.uses or not constant.shape:
            continue
        if not _is_weight(constant):
            others.append(str(constant))
            continue
        try:
            weight = Weight(constant, _finite(constant), *_channel_axes(constant))
            replace_constant(constant, compress(weight))
            replaced += 1
        except Skipped as reason:
            skipped.append(f"{constant}: {reason}")
    verify(program)
    unknown = f"Constants that are no weights to a reader stay as well: {'; '.join(others)}." if others else ""
    if not replaced and not skipped:
        warnings.warn(
            f"Nothing was compressed: the program has no float constant of more than {threshold} elements that only "
            "matrix products, convolutions, gathers and transposes read. What an earlier pass compressed stays as it "
            "is; for a mask with codes or a palette, use quantize_dtype or palettize_nbits of sparsify_weights. "
            + unknown,
            ConfigMatchWarning,
            stacklevel=3,
        )
    elif others:
        _logger.warning("%d constants were compressed. %s", replaced, unknown)
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


def _is_weight(constant: Constant) -> bool:
    return constant.size >= _SURELY_A_WEIGHT or all(_reads_weights(use, constant.shape) for use in constant.uses)


def _reads_weights(use: Use, shape: tuple[int, ...]) -> bool:
    if use.name != _RESHAPE:
        return use.name in CONSUMERS
    result = shape_of(use.operation)
    if result is None or not all(_reads_weights(reader, result) for reader in uses_of(use.operation)):
        return False
    return any(True for _ in _roles_for(use, shape))


def _channel_axes(constant: Constant) -> tuple[int, int, tuple[int, ...]]:
    """Return the axes of output channels, of input channels, and of stacked matrices.

    They are (0, 1) and none when nobody tells, or readers disagree (with a warning). Output channels on several axes
    are counted along the last one, in stacks.
    """
    shape = constant.shape
    roles = {known for use in constant.uses for known in _roles_for(use, shape)}
    pairs = {_channel_pair(known) for known in roles}
    if len(pairs) == 1:
        out_axis, in_axis = pairs.pop()
        stacked = {i for known in roles for i, role in enumerate(known) if role in (_OUT, _BATCH) and shape[i] > 1}
        return out_axis, in_axis, tuple(sorted(stacked - {out_axis, in_axis}))
    if pairs:
        warnings.warn(
            f"The {constant} has output and input channels on the axes {sorted(pairs)} for different readers; "
            "axis 0 is taken for the output and axis 1 for the input.",
            ConfigMatchWarning,
            stacklevel=4,
        )
    return 0, min(1, len(shape) - 1), ()


def _channel_pair(roles: _Roles) -> tuple[int, int]:
    last = {role: axis for axis, role in enumerate(roles)}
    return last[_OUT], last.get(_IN, last[_OUT])


def _roles_for(use: Use, shape: tuple[int, ...]) -> Iterator[_Roles]:
    """Yield what the axes of a tensor of ``shape`` are to a reader; one of them holds output channels."""
    rank = len(shape)
    if use.name in _MATMULS and rank >= 2:
        yield (*[_BATCH] * (rank - 2), *((_OUT, _IN) if use.position == 0 else (_IN, _OUT)))
    elif use.name in _OUT_FIRST:
        yield (_OUT, _IN, *[_OTHER] * (rank - 2))[:rank]
    elif use.name in _IN_FIRST:
        yield (_IN, _OUT, *[_OTHER] * (rank - 2))
    elif use.name == _TRANSPOSE:
        order = integers_of(use.operation.operands[1])
        if order is not None and len(order) == rank:
            for reader in uses_of(use.operation):
                for roles in _roles_for(reader, tuple(shape[axis] for axis in order)):
                    yield tuple(roles[order.index(axis)] for axis in range(rank))
    elif use.name == _RESHAPE:
        result = shape_of(use.operation)
        if result is not None and use.position == 0:
            for reader in uses_of(use.operation):
                for roles in _roles_for(reader, result):
                    before = _roles_before_reshape(shape, result, roles)
                    if before is not None:
                        yield before


def _roles_before_reshape(shape: tuple[int, ...], result: tuple[int, ...], roles: _Roles) -> _Roles | None:
    """Return what the axes of ``shape`` are when those of the reshaped tensor are ``roles``.

    Axes that a reshape merges have the role of the merged one. None when an axis is split between roles, or when no
    axis is left for the output or the input channels.
    """
    before = [_OTHER] * len(shape)
    sources = [axis for axis, size in enumerate(shape) if size > 1]
    targets = [axis for axis, size in enumerate(result) if size > 1]
    while sources and targets:
        merged, split = [sources.pop(0)], [targets.pop(0)]
        while (left := prod(shape[i] for i in merged)) != (right := prod(result[i] for i in split)):
            larger = sources if left < right else targets
            if not larger:
                return None
            (merged if left < right else split).append(larger.pop(0))
        group = {roles[i] for i in split}
        if len(group) > 1:
            return None
        for axis in merged:
            before[axis] = next(iter(group))
    spare = [axis for axis, size in enumerate(shape) if size == 1]
    for role in (_OUT, _IN):
        if role not in before:
            if not spare:
                return None
            before[spare.pop(0)] = role
    return tuple(before)
