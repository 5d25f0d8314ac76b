"""What each operator does to the bounds of its integers (see :mod:`._ranges`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.fx import Node

from ._arguments import shared_arguments
from ._intervals import Interval
from ._operators import MOVES, SPLITS

if TYPE_CHECKING:
    from ._ranges import RangeAnalysis

Result: TypeAlias = Interval | list[Interval | None] | None
Rule: TypeAlias = Callable[["RangeAnalysis", Node, dict[str, Any]], Result]

_TRUTH: Final = Interval(0, 1)


def _same(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return analysis.of(node.args[0])


def _restrided(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    """Bound what may lie beside a view: nothing is known of it."""
    source = node.args[0]
    return None if isinstance(source, Node) and shared_arguments(source) else analysis.of(source)


def _same_for_all(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return [analysis.of(node.args[0])] * len(node.meta["val"])


def _cast(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, Node) else None
    if getattr(value, "dtype", None) is None or value.is_floating_point() or value.is_complex():  # type: ignore[union-attr]
        return None
    bounds = analysis.of(source)
    return _truth_of(bounds) if node.meta["val"].dtype == torch.bool else bounds


def _truth_of(bounds: Interval | None) -> Interval:
    return Interval(1, 1) if bounds is not None and bounds.low > 0 else _TRUTH


def _binary(combine: Callable[[int, int], int]) -> Rule:
    """Return the rule of an operator that takes its extremes at the ends of both intervals."""

    def rule(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
        left, right = analysis.of(given["self"]), analysis.of(given["other"])
        if left is None or right is None:
            return None
        alpha = given.get("alpha", 1)
        if not isinstance(alpha, int):
            return None
        ends = [combine(a, alpha * b) for a, b in product(left, right)]
        return Interval(min(ends), max(ends))

    return rule


def _negate(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    bounds = analysis.of(node.args[0])
    return None if bounds is None else Interval(-bounds.high, -bounds.low)


def _absolute(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    bounds = analysis.of(node.args[0])
    if bounds is None:
        return None
    return Interval(0 if bounds.low <= 0 <= bounds.high else min(abs(bounds.low), abs(bounds.high)), bounds.magnitude)


def _clamp(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    bounds = analysis.of(given["self"])
    low = analysis.of(given.get("min")) if given.get("min") is not None else None
    high = analysis.of(given.get("max")) if given.get("max") is not None else None
    if bounds is None:
        # Where the lower bound lies above the upper one, the result is the upper one.
        return Interval(min(low.low, high.low), high.high) if low is not None and high is not None else None
    if low is not None:
        bounds = Interval(max(bounds.low, low.low), max(bounds.high, low.high))
    if high is not None:
        bounds = Interval(min(bounds.low, high.low), min(bounds.high, high.high))
    return bounds


def _extreme(pick: Callable[[int, int], int]) -> Rule:
    def rule(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
        if "other" in given and given["other"] is not None and isinstance(given["other"], Node):
            left, right = analysis.of(given["self"]), analysis.of(given["other"])
            if left is None or right is None:
                return None
            return Interval(pick(left.low, right.low), pick(left.high, right.high))
        if isinstance(node.meta["val"], torch.Tensor):
            return analysis.of(given["self"])
        return [analysis.of(given["self"]), _positions(analysis, given)]

    return rule


def _where(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return _hull(analysis, [given.get("self"), given.get("other")])


def _filled(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return _hull(analysis, [given["self"], given["value"]])


def _padded(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return _hull(analysis, [given["self"], given.get("value") or 0])


def _with_zero(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return _hull(analysis, [given["self"], 0])


def _scattered(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    source = given["src"] if "src" in given else given["value"] if "value" in given else given.get("values")
    return None if given.get("accumulate") or given.get("reduce") else _hull(analysis, [given["self"], source])


def _joined(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return _hull(analysis, list(given["tensors"]))


def _hull(analysis: RangeAnalysis, values: list[Any]) -> Interval | None:
    result: Interval | None = None
    for value in values:
        bounds = analysis.of(value)
        if bounds is None:
            return None
        result = bounds if result is None else result.hull(bounds)
    return result


def _divided(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    left, right = analysis.of(given["self"]), analysis.of(given["other"])
    if left is None or right is None or right.low <= 0:
        return None
    if given.get("rounding_mode", "floor") == "floor":
        ends = [a // b for a, b in product(left, right)]
    elif given["rounding_mode"] == "trunc":
        ends = [abs(a) // b * (1 if a >= 0 else -1) for a, b in product(left, right)]
    else:
        return None
    return Interval(min(ends), max(ends))


def _remainder(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    divisor = analysis.of(given["other"])
    return Interval(0, divisor.high - 1) if divisor is not None and divisor.low > 0 else None


def _signed_remainder(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    divisor = analysis.of(given["other"])
    return None if divisor is None else Interval(1 - divisor.magnitude, divisor.magnitude - 1)


def _reversed_difference(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    taken, source = analysis.of(given["self"]), analysis.of(given["other"])
    if taken is None or source is None or given.get("alpha", 1) != 1:
        return None
    return Interval(source.low - taken.high, source.high - taken.low)


def _bits(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    left, right = analysis.of(given["self"]), analysis.of(given["other"])
    if left is None or right is None or left.low < 0 or right.low < 0:
        return None
    return Interval(0, (1 << max(left.high, right.high).bit_length()) - 1)


def _sum(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    bounds, count = analysis.of(given["self"]), _reduced(analysis, given)
    if bounds is None or count is None:
        return None
    return Interval(min(bounds.low * count, 0), max(bounds.high * count, 0))


def _count(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    count = _reduced(analysis, given)
    return None if count is None else Interval(0, count)


def _reduced(analysis: RangeAnalysis, given: dict[str, Any]) -> int | None:
    """Return the largest number of elements that are reduced into one."""
    sizes = analysis.shape(given["self"])
    axes = given.get("dim")
    if isinstance(axes, int):
        axes = [axes]
    chosen = sizes if not axes else [sizes[axis] for axis in axes if sizes]
    count = 1
    for size in chosen:
        if size is None:
            return None
        count *= size.high
    return count


def _position_rule(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return _positions(analysis, given)


def _positions(analysis: RangeAnalysis, given: dict[str, Any]) -> Interval | None:
    """Return the bounds of positions along ``dim`` (along the flattened tensor when there is none)."""
    count = _reduced(analysis, given)
    return None if count is None else Interval(0, max(count - 1, 0))


def _value_and_position(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return [analysis.of(given["self"]), _positions(analysis, {"dim": -1, **given})]


def _nonzero(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    sizes = analysis.shape(given["self"])
    if not sizes or any(size is None for size in sizes):
        return None
    return Interval(0, max(max(size.high for size in sizes if size is not None) - 1, 0))


def _bucket(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    edges = given.get("boundaries") if "boundaries" in given else given.get("sorted_sequence")
    size = analysis.shape(edges)[-1] if isinstance(edges, Node) else None
    return None if size is None else Interval(0, size.high)


def _full(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return analysis.of(given["fill_value"] if "fill_value" in given else given["s"])


def _constant(value: Interval) -> Rule:
    return lambda analysis, node, given: value


def _arange(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    start, end = analysis.size(given.get("start", 0)), analysis.size(given["end"])
    step = given.get("step", 1)
    if start is None or end is None or not isinstance(step, int):
        return None
    if step > 0:
        return Interval(start.low, max(end.high - 1, start.low))
    return Interval(min(end.low + 1, start.high), start.high)


def _random(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    low, high = analysis.of(given.get("low", 0)), analysis.of(given["high"])
    return Interval(low.low, high.high - 1) if low is not None and high is not None else None


def _looked_up(analysis: RangeAnalysis, node: Node, given: dict[str, Any]) -> Result:
    return analysis.of(given["weight"])


_TRUTHS: Final = (
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "any", "all"),
    *("isnan", "isinf"),
)

RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(MOVES, _same),
    "as_strided": _restrided,
    **dict.fromkeys(SPLITS, _same_for_all),
    **dict.fromkeys(_TRUTHS, _constant(_TRUTH)),
    **dict.fromkeys(("_to_copy", "to", "convert_element_type"), _cast),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _full),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _constant(Interval(0, 0))),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(Interval(1, 1))),
    **dict.fromkeys(("eye", "one_hot"), _constant(_TRUTH)),
    **dict.fromkeys(("argmax", "argmin", "argsort"), _position_rule),
    **dict.fromkeys(("topk", "sort", "kthvalue", "mode", "median", "cummax", "cummin"), _value_and_position),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("sum", "cumsum"), _sum),
    **dict.fromkeys(("scatter", "select_scatter", "slice_scatter", "index_put"), _scattered),
    **dict.fromkeys(("bucketize", "searchsorted"), _bucket),
    **dict.fromkeys(("tril", "triu"), _with_zero),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), _bits),
    **dict.fromkeys(("div", "floor_divide"), _divided),
    **dict.fromkeys(("max", "maximum"), _extreme(max)),
    **dict.fromkeys(("min", "minimum"), _extreme(min)),
    "add": _binary(lambda a, b: a + b),
    "sub": _binary(lambda a, b: a - b),
    "rsub": _reversed_difference,
    "remainder": _remainder,
    "fmod": _signed_remainder,
    "mul": _binary(lambda a, b: a * b),
    "neg": _negate,
    "abs": _absolute,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "where": _where,
    "masked_fill": _filled,
    "constant_pad_nd": _padded,
    "count_nonzero": _count,
    "nonzero": _nonzero,
    "arange": _arange,
    "randint": _random,
    "embedding": _looked_up,
    "sign": _constant(Interval(-1, 1)),
}
