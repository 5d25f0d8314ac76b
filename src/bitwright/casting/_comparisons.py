"""Comparisons with numbers, whose answers have to stay the same when what is compared becomes 16-bit.

Of a buffer or constant every value is known, so that a threshold between the narrowed values is found, or there is none
because two values on either side became one. Of what is computed only the format is known, and the mask numbers that
went into it (see :func:`bitwright.casting._numbers.narrow_threshold`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ._arguments import bound_arguments, written_in_place
from ._cleanup import CAST_OPS, dtype_of
from ._numbers import STANDS_FOR_INFINITY, is_beyond, largest, narrow_bounds, narrow_tensor, narrow_threshold
from ._operators import FILLED, MOVES, attribute_of, bounds_results, op_name, scalars
from ._program import static_inputs
from ._reachable import reachable

_ORDERS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "lt": torch.lt,
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
}
#: The same from the other side.
_MIRRORED: Final = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
#: Of these the threshold itself is on the upper side.
_ABOVE: Final = frozenset({"lt", "ge"})
#: What equality with a bound asks, by the sign of the bound: whether a value lies at its end.
_EQUALITIES: Final = {"eq": ("le", "ge"), "ne": ("gt", "lt")}
_BOUNDS: Final = frozenset(
    {"clamp", "clamp_max", "clamp_min", "clip", "hardtanh", "maximum", "minimum", "fmax", "fmin"}
)
#: Operators that hand on values of their arguments, or numbers in their place.
_HANDING_ON: Final = frozenset({*MOVES, *_BOUNDS, "cat", "masked_fill", "nan_to_num", "stack", "where"})
_LEAST_MASK_NUMBER: Final = float(torch.tensor(STANDS_FOR_INFINITY, dtype=torch.float32))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An ordering of the values of a tensor by a number.

    Attributes:
        node: the operator.
        compared: the tensor.
        order: name of the operator with the tensor on its left: ``lt``, ``le``, ``gt`` or ``ge``.
        threshold: the number.
        held: the tensor that holds the number, all over; None when the operator is given a Python number.
        low: no value is smaller.
        high: no value is larger.
    """

    node: Node
    compared: Node
    order: str
    threshold: float
    held: Node | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_settled(self) -> bool:
        """Tell whether the answer is the same for all values between the bounds."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64)
        at_low, at_high = self.answers(ends, _in_float32(self.threshold)).tolist()
        return bool(at_low == at_high)

    @property
    def source(self) -> Node:
        """What the compared values come from, seen through operators that only move them."""
        source = self.compared
        while source.op == "call_function" and op_name(source) in MOVES and isinstance(source.args[0], Node):
            source = source.args[0]
        return source

    def origins(self, stops: Callable[[Node], bool]) -> set[Node]:
        """Return where the values come from, seen through operators that hand them on, up to nodes that ``stops``."""

        def givers(node: Node) -> list[Node]:
            hands_on = node.op == "call_function" and (op_name(node) in _HANDING_ON or node.target in CAST_OPS)
            if stops(node) or not hands_on:
                return []
            return [source for source in node.all_input_nodes if getattr(dtype_of(source), "is_floating_point", False)]

        return {node for node in reachable([self.compared], givers) if not givers(node)}

    def answers(self, values: torch.Tensor, threshold: float) -> torch.Tensor:
        """Order ``values`` by ``threshold``."""
        return _ORDERS[self.order](values, threshold)

    def settle(self, threshold: float) -> None:
        """Let the operator compare with another number, which it is given as a Python number."""
        self.node.target = getattr(torch.ops.aten, self.order).Scalar
        self.node.args = (self.compared, threshold)


def is_comparison(node: Node) -> bool:
    """Tell whether ``node`` orders the values of a tensor."""
    return isinstance(node.target, OpOverload) and op_name(node) in _ORDERS and len(node.args) == 2


def comparison_of(node: Node, constants: Mapping[Node, torch.Tensor]) -> Comparison | None:
    """Return the comparison with a number that ``node`` is; None when it is none.

    Args:
        node: any node.
        constants: tensors of which a number is read, by node.
    """
    if not is_comparison(node):
        return _equality_of(node, constants)
    left, right = node.args
    if isinstance(left, Node) and isinstance(right, int | float) and not isinstance(right, bool):
        return Comparison(node, left, op_name(node), float(right), None, *_bounds_of(left, constants))
    for compared, held, order in ((left, right, op_name(node)), (right, left, _MIRRORED[op_name(node)])):
        if isinstance(compared, Node) and isinstance(held, Node) and _is_like_a_number(held, compared):
            number = _number_in(held, constants)
            if number is not None:
                return Comparison(node, compared, order, number, held, *_bounds_of(compared, constants))
    return None


def _equality_of(node: Node, constants: Mapping[Node, torch.Tensor]) -> Comparison | None:
    """Return what an equality with a bound asks that a 16-bit format may not hold; None for other operators."""
    orders = _EQUALITIES.get(op_name(node)) if isinstance(node.target, OpOverload) else None
    compared, other = node.args if orders is not None and len(node.args) == 2 else (None, None)
    number = _number_given(other, constants)
    if orders is None or not isinstance(compared, Node) or number is None or not is_beyond(number, torch.float16):
        return None
    bounds = _bounds_of(compared, constants)
    held = other if isinstance(other, Node) else None
    return Comparison(node, compared, orders[number > 0], number, held, *bounds) if number in bounds else None


def _number_given(argument: Any, constants: Mapping[Node, torch.Tensor]) -> float | None:
    """Return the float32 number that an argument is, or is filled with; None when there is none."""
    if isinstance(argument, Node):
        return _number_in(argument, constants)
    is_number = isinstance(argument, int | float) and not isinstance(argument, bool)
    return _in_float32(argument) if is_number else None


def _bounds_of(node: Node, constants: Mapping[Node, torch.Tensor]) -> tuple[float, float]:
    """Return the numbers between which an operator has put its values, moved or not; infinities when it has not."""
    while node.op == "call_function" and op_name(node) in MOVES and isinstance(node.args[0], Node):
        node = node.args[0]
    low, high = -math.inf, math.inf
    name = op_name(node) if node.op == "call_function" else ""
    for argument, value in bound_arguments(node) if name in _BOUNDS else ():
        number = _number_given(value, constants)
        if number is None or math.isnan(number):
            continue
        if argument.name.startswith("min") or name in ("maximum", "fmax"):
            low = max(low, number)
        elif argument.name.startswith("max") or name in ("minimum", "fmin"):
            high = min(high, number)
    return min(low, high), high


def _is_like_a_number(held: Node, compared: Node) -> bool:
    """Tell whether a float32 tensor is compared with another in float32, and the result has its shape."""
    if dtype_of(compared) != torch.float32 or dtype_of(held) not in (torch.float32, torch.float64):
        return False
    shape, other = compared.meta["val"].shape, held.meta["val"].shape
    if len(other) > len(shape) or (dtype_of(held) == torch.float64 and (len(other) > 0 or not shape)):
        return False
    sizes = zip(reversed(shape), reversed(other), strict=False)
    return all(statically_known_true(size == 1) or statically_known_true(size == whole) for whole, size in sizes)


def _number_in(node: Node, constants: Mapping[Node, torch.Tensor]) -> float | None:
    """Return the number that all elements of ``node`` are; None when it is not known, or there are several."""
    number: float | None = None
    source = node.args[0] if node.args else None
    if node in constants:
        values = constants[node].detach().reshape(-1)
        if values.is_floating_point() and values.numel() and bool((values == values[0]).all()):
            number = float(values[0])
    elif node.op == "call_function" and op_name(node) in FILLED:
        number = next((float(value) for _, value in scalars(node)), None)
    elif isinstance(source, Node) and (node.target in CAST_OPS or op_name(node) in (*MOVES, "neg")):
        number = _number_in(source, constants)
        if number is not None and op_name(node) == "neg":
            number = -number
    dtype = dtype_of(node)
    if number is None or dtype is None:
        return None
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def constants_of(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Return the parameters, buffers and constants that no operator of the program writes to, by node."""
    mutations = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
    written = {spec.target for spec in program.graph_signature.output_specs if spec.kind in mutations}
    found = {node: tensor for node, spec, tensor in static_inputs(program) if spec.target not in written}
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="get_attr"):
                value = attribute_of(module, str(node.target))
                if isinstance(value, torch.Tensor):
                    found[node] = value
            for node in written_in_place(module.graph):
                found.pop(node, None)
    return found


def comparisons_of(program: ExportedProgram, constants: Mapping[Node, torch.Tensor]) -> dict[Node, Comparison]:
    """Return the comparisons with numbers in all graphs of a program; trained parameters count as no numbers."""
    parameters = {node for node, spec, _ in static_inputs(program) if spec.kind == InputKind.PARAMETER}
    numbers = {node: tensor for node, tensor in constants.items() if node not in parameters}
    found: dict[Node, Comparison] = {}
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            changing = written_in_place(module.graph)
            for node in module.graph.nodes:
                comparison = comparison_of(node, numbers)
                if comparison is not None and comparison.held not in changing:
                    found[node] = comparison
    return found


def is_only_compared(source: Node, comparisons: Collection[Node]) -> bool:
    """Tell whether values are ordered by numbers, moved or not, and used for nothing else."""
    return all(
        user in comparisons or (op_name(user) in MOVES and is_only_compared(user, comparisons)) for user in source.users
    )


def narrow_constant(node: Node, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the stored float32 ``tensor`` that ``node`` stands for in ``dtype``."""
    return narrow_bounds(tensor, dtype) if bounds_results(node) else narrow_tensor(tensor, dtype)


def computed_threshold(
    comparison: Comparison, dtype: torch.dtype, constants: Mapping[Node, torch.Tensor] | None = None
) -> float:
    """Return the number with which numbers of ``dtype`` compare as those that they stand for did in float32."""
    threshold, above = comparison.threshold, comparison.order in _ABOVE
    if not _LEAST_MASK_NUMBER <= abs(_in_float32(threshold)) < math.inf:
        return narrow_threshold(threshold, dtype, above=above)
    masks = max(_mask_numbers(comparison.compared, constants or {}), default=largest(torch.float32))
    return narrow_threshold(_in_float32(threshold), dtype, above=above, stands_for=masks)


def _mask_numbers(node: Node, constants: Mapping[Node, torch.Tensor]) -> Iterator[float]:
    """Yield the magnitudes of the finite numbers standing for infinity from which ``node`` is computed."""
    for member in reachable([node], lambda inner: inner.all_input_nodes):
        numbers = [abs(_in_float32(value)) for _, value in scalars(member)]
        if member in constants and constants[member].dtype == torch.float32 and constants[member].numel():
            magnitude = constants[member].detach().abs()
            numbers.append(float(torch.where(magnitude.isfinite(), magnitude, 0.0).max()))
        yield from (number for number in numbers if _LEAST_MASK_NUMBER <= number < math.inf)


def _in_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float64).float())


def constant_threshold(comparison: Comparison, values: torch.Tensor, narrowed: torch.Tensor) -> float | None:
    """Return a number that orders ``narrowed`` as ``comparison`` did ``values``; None when there is none.

    Args:
        comparison: what is asked about the values.
        values: the float32 values.
        narrowed: the same in the 16-bit dtype.
    """
    threshold, above = comparison.threshold, comparison.order in _ABOVE
    answers = comparison.answers(values, threshold)
    candidates = [computed_threshold(comparison, narrowed.dtype)]
    # The value nearest to the threshold, on the side where the threshold itself is.
    side = values >= threshold if above else values <= threshold
    if bool(side.any()):
        nearest = narrowed[side].min() if above else narrowed[side].max()
        candidates.append(float(nearest))
    else:
        candidates.append(math.inf if above else -math.inf)
    return next((one for one in candidates if torch.equal(comparison.answers(narrowed, one), answers)), None)
