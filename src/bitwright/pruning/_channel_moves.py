"""Where the channels of a value are after an op that handles each channel by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.program import Op

from ._channel_spaces import Channels

__all__ = ["keeps_zeros", "moved_channels", "widths"]

_ZERO_TO_ZERO = frozenset(
    {"relu", "relu_", "relu6", "gelu", "silu", "tanh", "tanh_", "leaky_relu", "leaky_relu_", "elu", "selu", "celu"}
    | {"mish", "hardswish", "hardtanh", "dropout", "dropout2d", "dropout3d", "contiguous", "clone", "detach", "abs"}
    | {"square", "neg", "softsign", "float", "to", "type_as", "identity", "prelu"}
)
_UNARY = _ZERO_TO_ZERO | {"sigmoid", "sigmoid_", "hardsigmoid", "softplus", "logsigmoid", "exp", "clamp", "clamp_"}
_POOLS = frozenset(
    f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)
)
_RESIZES = frozenset({"interpolate", "upsample"})
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin"})
_RESHAPES = frozenset({"flatten", "view", "reshape", "unsqueeze", "squeeze"})
_SWAPS = frozenset({"transpose", "swapaxes", "swapdims"})


def keeps_zeros(op: Op) -> bool:
    """Whether what is zero everywhere is zero behind the op."""
    if op.type == "hardtanh":
        return float(op.literals.get("min_val", -1)) <= 0 <= float(op.literals.get("max_val", 1))
    return op.type not in _UNARY or op.type in _ZERO_TO_ZERO


def moved_channels(op: Op, channels: Channels, before: Sequence[int]) -> Channels | None:
    """Return the channels of the op's output; None where it mixes them, or might.

    Args:
        op: an op with a single tensor among its arguments.
        channels: those of that tensor.
        before: shape of that tensor.
    """
    if len(op.outputs) != 1:
        return None
    after = [int(size) for size in op.outputs[0].shape]
    dim = channels.dim
    if op.type in _UNARY:
        return channels
    if op.type in _POOLS:
        spatial = int(op.type[-2])
        if dim != len(before) - 1 - spatial or len(after) != len(before):
            return None
        literals = op.literals
        averages_zeros = op.type.startswith("avg") and any(widths(literals.get("padding", 0)))
        divided = literals.get("divisor_override") is not None  # fewer entries in windows over the end
        sums = op.type.startswith("avg") and divided
        return channels.constant_where_zero() if averages_zeros or sums else channels
    if op.type in _RESIZES:
        return channels if dim == 1 else None
    if op.type in _REDUCTIONS:
        return _reduced(op, channels, len(before))
    if op.type in _SWAPS or op.type == "permute":
        order = _order(op, len(before))
        return None if order is None else channels.moved(order.index(dim))
    if op.type == "__getitem__":
        return _indexed(channels, op.literals["index"], before) if "index" in op.literals else None
    if op.type in _RESHAPES:
        return _reshaped(channels, before, after)
    return None


def _reduced(op: Op, channels: Channels, rank: int) -> Channels | None:
    """Return the channels behind a reduction over other dimensions."""
    named: Any = [op.literals[name] for name in ("dim", "axis") if name in op.literals]
    given = named or [entry for entry in op.literals.values() if not isinstance(entry, bool | float | str)]
    if not given:
        return None
    dims = {int(dim) % rank for dim in ((given[0],) if isinstance(given[0], int) else given[0])}
    if not dims or channels.dim in dims:
        return None
    if op.type == "sum":  # of a constant it depends on how many there are
        channels = channels.constant_where_zero()
    if len(op.outputs[0].shape) == rank:  # keepdim
        return channels
    return channels.moved(channels.dim - sum(dim < channels.dim for dim in dims))


def _order(op: Op, rank: int) -> list[int] | None:
    """Return which dimension of the input each one of the output is."""
    literals = op.literals
    if op.type == "permute":
        order = [int(dim) % rank for dim in literals.get("dims", ())]
        return order if sorted(order) == list(range(rank)) else None
    swapped = [literals.get(f"dim{i}", literals.get(f"axis{i}")) for i in range(2)]
    dims = [dim % rank for dim in swapped if isinstance(dim, int)]
    if len(dims) != 2:
        return None
    first, second = dims
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return order


def _indexed(channels: Channels, index: Any, before: Sequence[int]) -> Channels | None:
    """Return the channels behind an index that takes all of them and picks, cuts or adds other dimensions."""
    entries = list(index) if isinstance(index, tuple) else [index]
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    whole: list[Any] = [slice(None)] * (len(before) - used)
    place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    dim = moved = 0
    for entry in [*entries[:place], *whole, *entries[place + 1 :]]:
        if dim == channels.dim and entry is not None:
            every = isinstance(entry, slice) and entry.indices(before[dim]) == (0, before[dim], 1)
            return channels.moved(moved) if every else None
        dim += entry is not None
        moved += not isinstance(entry, int)
    return None


def _reshaped(channels: Channels, before: Sequence[int], after: Sequence[int]) -> Channels | None:
    """Return the channels behind a reshape that leaves them in their order, with what is in front of them."""
    dim = channels.dim
    in_front, behind = list(before[:dim]), _product(before[dim + 1 :])
    if list(after[:dim]) != in_front or len(after) <= dim:
        return None
    rest = _product(after[dim + 1 :])
    if after[dim] == before[dim] and rest == behind:
        return channels
    if rest == 1 and after[dim] == before[dim] * behind:
        return channels.repeated(behind)
    return None


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= int(size)
    return product


def widths(padding: Any) -> tuple[int, ...]:
    """Return how far a convolution pads, dimension by dimension; 1 for ``"same"``."""
    if isinstance(padding, str):
        return (0,) if padding == "valid" else (1,)
    return (padding,) if isinstance(padding, int) else tuple(padding)
