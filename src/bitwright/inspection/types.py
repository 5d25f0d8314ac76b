"""Data classes of the model inspector: modules, ops, and the edges between them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bitwright.quantization.config import ExecutionMode

__all__ = ["BoundaryEdge", "InputEdge", "ModelSummary", "ModuleContext", "ModuleInfo", "OpInfo", "SourceFrame"]


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """A line of a ``forward`` method that an op was called from.

    Attributes:
        filename: path of the source file.
        lineno: line number, from 1.
        function_name: always ``"forward"``.
        code_context: the line, without indentation; empty where the source is not known.
    """

    filename: str
    lineno: int
    function_name: str
    code_context: str


@dataclass(frozen=True, slots=True)
class ModuleContext:
    """A module that an op ran in.

    Attributes:
        module_name: path of the module, ``""`` for the root; what ``module_name_configs`` matches.
        module_type: full name of its class; what ``module_type_configs`` matches.
    """

    module_name: str
    module_type: str


@dataclass(eq=False, repr=False)
class OpInfo:
    """An op of the model, or the source of a tensor: an input, a parameter or a buffer. Equal by name.

    Attributes:
        op_name: what ``op_name_config`` matches; cannot be changed.
        op_type: what ``op_type_config`` matches; None for sources and for outputs of the model.
        module_stack: the modules that the op ran in, outermost first; empty for sources.
        source_frames: lines of ``forward`` methods that led to the op, outermost first.
        inputs: one edge per tensor argument, in the op's order.
        outputs: the ops that read each output, by the output's position.
        is_state: whether this is a parameter or a buffer.
        order: position in the order of execution.
    """

    op_name: str
    op_type: str | None
    module_stack: tuple[ModuleContext, ...]
    source_frames: tuple[SourceFrame, ...]
    inputs: tuple[InputEdge, ...]
    outputs: dict[int, tuple[OpInfo, ...]]
    is_state: bool
    order: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "op_name" and "op_name" in self.__dict__:
            raise AttributeError("op_name identifies the op and cannot be changed; make a new OpInfo instead.")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return self.op_name == other.op_name if isinstance(other, OpInfo) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.op_name)

    def __repr__(self) -> str:
        return f"OpInfo(op_name={self.op_name!r}, op_type={self.op_type!r})"

    @property
    def _display_name(self) -> str:
        """A state's local name, which is what ``op_state_spec`` matches; else the op's name."""
        return self.op_name.rpartition(".")[2] if self.is_state else self.op_name


@dataclass(frozen=True)
class InputEdge:
    """Where one tensor argument of an op comes from. Attributes of the source can be read on the edge itself.

    Attributes:
        op: the source.
        output_idx: position among the outputs of ``op``; for inputs and states 0 in graph mode and None in eager mode.
        index: the argument's key in ``op_input_spec``.
    """

    op: OpInfo
    output_idx: int | None
    index: int = field(default=0, compare=False, repr=False)

    @property
    def op_name(self) -> str:
        """Name of the source."""
        return self.op.op_name

    @property
    def op_type(self) -> str | None:
        """Type of the source."""
        return self.op.op_type

    @property
    def is_state(self) -> bool:
        """Whether the source is a parameter or a buffer."""
        return self.op.is_state

    @property
    def module_stack(self) -> tuple[ModuleContext, ...]:
        """The modules that the source ran in."""
        return self.op.module_stack

    @property
    def inputs(self) -> tuple[InputEdge, ...]:
        """The edges into the source."""
        return self.op.inputs

    @property
    def outputs(self) -> dict[int, tuple[OpInfo, ...]]:
        """The readers of the source's outputs."""
        return self.op.outputs

    @property
    def _display_name(self) -> str:
        return self.op._display_name


@dataclass(frozen=True)
class BoundaryEdge:
    """An op at a module's boundary.

    Attributes:
        op: the op inside the module.
        index: position of its argument that receives the tensor, or of its output that leaves.
    """

    op: OpInfo
    index: int


@dataclass
class ModuleInfo:
    """A module with its ops, children and boundary.

    Attributes:
        module_name: path, ``""`` for the root.
        module_type: full name of its class.
        child_modules: modules called directly below, by path.
        ops: ops called directly in this module's forward.
        input_ops: the ops that read each input, by the key that ``module_input_spec`` has for the input.
        output_ops: the op that makes each output, by the key that ``module_output_spec`` has for the output.
    """

    module_name: str
    module_type: str
    child_modules: dict[str, ModuleInfo]
    ops: list[OpInfo]
    input_ops: dict[int, list[BoundaryEdge]]
    output_ops: dict[int, BoundaryEdge]

    def children(self) -> Iterator[ModuleInfo]:
        """Yield the modules directly below."""
        yield from self.child_modules.values()

    def named_children(self) -> Iterator[tuple[str, ModuleInfo]]:
        """Yield path and module for the modules directly below."""
        yield from self.child_modules.items()

    def modules(self) -> Iterator[ModuleInfo]:
        """Yield this module and all below it, depth first."""
        yield self
        for child in self.child_modules.values():
            yield from child.modules()

    def named_modules(self) -> Iterator[tuple[str, ModuleInfo]]:
        """Yield path and module for this module and all below it, depth first."""
        for module in self.modules():
            yield module.module_name, module

    def get_submodule(self, module_name: str) -> ModuleInfo:
        """Return this module or one below it by its full path.

        Raises:
            KeyError: there is none of this path.
        """
        for module in self.modules():
            if module.module_name == module_name:
                return module
        near = difflib.get_close_matches(module_name, [module.module_name for module in self.modules()], n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise KeyError(f"No module {module_name!r} below {self.module_name or '<root>'!r}.{hint}")

    def all_ops(self) -> list[OpInfo]:
        """Return the ops of this module and of all below it, in order of execution."""
        return sorted((op for module in self.modules() for op in module.ops), key=lambda op: op.order)


@dataclass
class ModelSummary:
    """What :class:`~bitwright.inspection.ModelInspector` found.

    Attributes:
        model: the root module.
        mode: the execution mode whose names these are.
    """

    model: ModuleInfo
    mode: ExecutionMode
