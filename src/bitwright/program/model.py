"""Data classes of the program: what planning, insertion, inspection and export read.

A :class:`Program` is built by a front end (``trace_eager``, ``capture_graph``) and is not changed afterwards.
It holds no copies of tensors: states refer to the model's own parameters and buffers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = [
    "Argument",
    "ModuleCall",
    "Op",
    "Program",
    "StateTensor",
    "StateView",
    "Value",
    "ValueKind",
    "collect_states",
]

_QUANTIZABLE_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class ValueKind(enum.StrEnum):
    """Where a value comes from."""

    INPUT = "input"
    STATE = "state"
    INTERMEDIATE = "intermediate"
    OTHER = "other"


# ``nn.MultiheadAttention`` hands the weight of its last layer to the function that computes all of it.
_LINEAR_READS = frozenset({("linear", "weight"), ("multi_head_attention_forward", "out_proj_weight")})


@dataclass(eq=False, repr=False, slots=True)
class StateTensor:
    """A parameter or buffer of the model; one object for all the names it is registered under.

    Attributes:
        names: every dotted name, the canonical one (first in ``named_modules`` order) first.
        owners: the ``(module path, attribute)`` of each name.
        tensor: the model's own tensor.
        is_parameter: False for buffers.
        uses: arguments that read it.
        views: arguments that read a view of it, once planning has linked them.
    """

    names: tuple[str, ...]
    owners: tuple[tuple[str, str], ...]
    tensor: torch.Tensor
    is_parameter: bool
    uses: list[Argument] = field(default_factory=list)
    views: list[Argument] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"StateTensor({self.name!r}, {tuple(self.tensor.shape)})"

    @property
    def name(self) -> str:
        """Canonical dotted name."""
        return self.names[0]

    @property
    def attributes(self) -> tuple[str, ...]:
        """Local attribute names, without repeats, in order of the owners."""
        return tuple(dict.fromkeys(attribute for _, attribute in self.owners))

    @property
    def is_linear(self) -> bool:
        """Whether it is the ``weight`` of linear layers and nothing else reads it, such as an embedding."""
        reads = {(use.op.type, use.name) for use in self.uses}
        return bool(reads) and reads <= _LINEAR_READS and self.attributes == ("weight",)


@dataclass(eq=False, slots=True)
class StateView:
    """What a value has of a parameter that was cast, transposed or cut on its way.

    Attributes:
        state: the parameter.
        axes: the parameter's axis behind each axis of the value.
        is_cast: at most the dtype differs.
        is_operand: an op reads the value, or what is made of it, as a weight.
    """

    state: StateTensor
    axes: tuple[int, ...]
    is_cast: bool
    is_operand: bool = False


@dataclass(eq=False, repr=False, slots=True)
class Value:
    """One tensor that flows between ops.

    Attributes:
        name: unique, for people (``"conv.conv2d"``, ``"x"``, ``"fc.weight"``).
        shape: sizes at the time of tracing; an entry may be symbolic in graph mode.
        producer: the op that computed it, None for inputs and states.
        output_index: position among all results of the producer, read or not.
        uses: the arguments that read it.
        state: set where ``kind`` is STATE.
        view: set where the numbers are those of a parameter, once planning has linked views.
        is_masked: numbers stand for minus infinity (``masks.holds_mask``), as far as the front end sees numbers.
    """

    name: str
    kind: ValueKind
    shape: tuple[Any, ...]
    dtype: torch.dtype
    producer: Op | None = None
    output_index: int = 0
    uses: list[Argument] = field(default_factory=list)
    state: StateTensor | None = None
    view: StateView | None = None
    is_masked: bool = False

    def __repr__(self) -> str:
        return f"Value({self.name!r}, {self.kind}, {self.shape}, {self.dtype})"

    @property
    def numel(self) -> int:
        """Number of elements (symbolic sizes count with their hint)."""
        count = 1
        for size in self.shape:
            count *= int(size)
        return count

    @property
    def is_quantizable(self) -> bool:
        """True for a floating-point tensor with more than one element."""
        return self.dtype in _QUANTIZABLE_FLOATS and self.numel > 1


@dataclass(eq=False, repr=False, slots=True)
class Argument:
    """One tensor argument of an op.

    Attributes:
        index: position in the op's normalised argument list; for a list of tensors, see ``item``.
        name: the parameter's name in the op's signature (``"input"``, ``"weight"``).
        item: position inside the list where the argument is a list of tensors, else None.
    """

    op: Op
    index: int
    name: str
    value: Value
    item: int | None = None

    def __repr__(self) -> str:
        return f"Argument({self.op.name!r}, {self.index}, {self.label!r}, {self.value!r})"

    @property
    def label(self) -> str:
        """Name that is unique within the op."""
        return self.name if self.item is None else f"{self.name}_{self.item}"


@dataclass(eq=False, repr=False, slots=True)
class Op:
    """One call of a function on tensors.

    Attributes:
        name: what ``op_name_config`` matches: ``"path.func_1"`` in eager mode, the node's name in graph mode.
        type: what ``op_type_config`` matches (``"linear"``, ``"add_"``).
        target: the Python function or the aten overload.
        module_stack: paths of the modules that the call ran in, outermost (``""``) first.
        call: name of the call inside its module (``"add_1"``): how the runtime recognises it in eager mode.
        literals: arguments that are not tensors, by position and name, as far as planning needs them.
        handle: the front end's own object for this op (an ``fx.Node`` in graph mode).
        aliases: further spellings of ``type`` that ``op_type_config`` may use.
        written_in: where the call stands in the model's code, in eager mode: a function's name, and an offset in it.
        overwrites: names of the parameters and buffers whose memory it writes to, through whatever view, in eager mode.
    """

    name: str
    type: str
    target: Callable[..., Any]
    module_stack: tuple[str, ...]
    call: str
    arguments: list[Argument] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    literals: dict[str, Any] = field(default_factory=dict)
    handle: Any = None
    aliases: tuple[str, ...] = ()
    written_in: tuple[str, int] | None = None
    overwrites: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Op({self.name!r}, {self.type!r}, in={self.module_path!r})"

    @property
    def module_path(self) -> str:
        """Path of the innermost module."""
        return self.module_stack[-1]


@dataclass(eq=False, repr=False, slots=True)
class ModuleCall:
    """The first call of a module: which values crossed its boundary, numbered in the order of forward's arguments.

    Attributes:
        path: canonical module path.
        inputs: tensors among the flattened arguments (None where the argument is no tensor).
        input_names: forward's parameter name for each entry of ``inputs``.
        outputs: tensors among the flattened outputs.
        ops: every recorded call made directly in this module's forward, in order.
        children: paths of the modules called directly.
        repeats: boundaries of the later calls, where the front end records them.
        times: how often the module was called, where the front end counts it.
    """

    path: str
    inputs: list[Value | None] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    outputs: list[Value | None] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    repeats: list[ModuleCall] = field(default_factory=list)
    times: int = 1


@dataclass(eq=False, repr=False, slots=True)
class Program:
    """The model as planning sees it.

    Attributes:
        mode: ``"eager"`` or ``"graph"``.
        ops: in order of execution.
        states: by canonical name, only those of the model that hold at least one element.
        calls: the first call of each module, by canonical path.
        inputs: the model's tensor inputs.
        outputs: the model's tensor outputs.
        modules: canonical path of each module, to the module's class.
        replaced: names of the parameters whose ``data`` the forward set, in eager mode.
        assigned: by name of a buffer, the other tensor that the forward has put in its place, in eager mode.
        readers: paths of modules whose forwards read states that ``parameters()`` and the like gave, in eager mode.
        listed: paths of modules that were asked for these.
        by_key: names of parameters that the forward looked up in ``_parameters``, in eager mode.
        computed_once: calls that made constants which the model keeps, and does not make again for the same inputs, in
            eager mode; none of ``ops``.
        enclosed: ops inside ``torch.vmap``, ``torch.cond`` and the like, where no simulator can stand, as far as they
            read states, which alone are among their arguments; each with what it is inside. None of ``ops``.
    """

    mode: str
    ops: list[Op]
    states: dict[str, StateTensor]
    calls: dict[str, ModuleCall]
    inputs: list[Value]
    outputs: list[Value]
    modules: dict[str, type[nn.Module]]
    replaced: tuple[str, ...] = ()
    assigned: Mapping[str, Value] = field(default_factory=dict)
    readers: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    by_key: tuple[str, ...] = ()
    computed_once: tuple[Op, ...] = ()
    enclosed: tuple[tuple[str, Op], ...] = ()

    def values(self) -> Iterator[Value]:
        """Yield every value once: inputs, then each op's state arguments and outputs in order."""
        seen: set[int] = set()
        for value in self._all_values():
            if id(value) not in seen:
                seen.add(id(value))
                yield value

    def _all_values(self) -> Iterator[Value]:
        yield from self.inputs
        for op in self.ops:
            yield from (argument.value for argument in op.arguments)
            yield from op.outputs


def collect_states(model: nn.Module) -> dict[str, StateTensor]:
    """Return the model's parameters and buffers by canonical name, tied ones under one entry."""
    found: dict[int, StateTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        entries = [*module._parameters.items(), *module._buffers.items()]
        for attribute, tensor in entries:
            if tensor is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            known = found.get(id(tensor))
            if known is None:
                found[id(tensor)] = StateTensor((name,), ((path, attribute),), tensor, isinstance(tensor, nn.Parameter))
            else:
                known.names += (name,)
                known.owners += ((path, attribute),)
    return {state.name: state for state in found.values()}
