"""The model inspector: the ops and modules of a model under the names that configurations match."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.python_utils import fqn
from bitwright.base_model_compressor import _BaseModelCompressor
from bitwright.program import Op, Program, trace_eager
from bitwright.program.export_errors import not_a_tuple
from bitwright.quantization.config import ExecutionMode, InvalidExecutionModeError

from ._format import format_summary
from ._frames import running_frames
from ._supported import check_compressor, supported_op_types
from ._tree import build_tree
from .types import ModelSummary, OpInfo, SourceFrame

__all__ = ["ModelInspector"]


class ModelInspector:
    """Finds the ops of a model, with the names and types that a configuration addresses them by.

    It reads the same program as ``Quantizer.plan``; a name that it prints is a name that a config matches.

    Args:
        model: the model; a ``GraphModule`` may be given in graph mode.
        example_inputs: positional inputs; None only for a ``GraphModule`` in graph mode.
        execution_mode: ``"graph"`` or ``"eager"``: the two name ops differently.
        compressor: ``Quantizer``, ``KMeansPalettizer`` or ``MagnitudePruner``, to show only the ops that it knows.
        dynamic_shapes: passed on to ``torch.export``; graph mode only.
        export_with_no_grad: export under ``no_grad``; graph mode only.
        example_kwargs: keyword inputs.

    Attributes:
        summary: the tree of modules and ops.

    Raises:
        TypeError: ``model`` is no module, or a ``GraphModule`` in eager mode, or ``example_inputs`` is no sequence.
        InvalidExecutionModeError: there is no such mode.
        ValueError: no example inputs, or a compressor that is unknown or does not work in this mode.
        TraceError: the model cannot be exported, or its forward raised.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
        >>> inspector = ModelInspector(model, (torch.randn(1, 4),), "eager")
        >>> [op.op_name for op in inspector.summary.model.all_ops()]
        ['0.linear', '1.relu']
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Sequence[Any] | None,
        execution_mode: ExecutionMode | str,
        compressor: type[_BaseModelCompressor] | None = None,
        dynamic_shapes: Any = None,
        export_with_no_grad: bool = True,
        *,
        example_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        mode = _check(model, example_inputs, execution_mode, example_kwargs)
        check_compressor(compressor, mode)
        frames: dict[int, tuple[SourceFrame, ...]] = {}
        if mode == ExecutionMode.EAGER:
            if dynamic_shapes is not None or not export_with_no_grad:
                warnings.warn("dynamic_shapes and export_with_no_grad have no effect in eager mode.", stacklevel=2)
            self._program = trace_eager(model, example_inputs or (), example_kwargs, _frame_recorder(frames))
        else:
            self._program = _graph_program(model, example_inputs, example_kwargs, dynamic_shapes, export_with_no_grad)
        types = supported_op_types(compressor, self._program, model)
        self.summary = ModelSummary(build_tree(self._program, types, frames), mode)
        self._ops = tuple(self.summary.model.all_ops())

    def get_matched_ops_for_op_type(self, op_type: str) -> tuple[OpInfo, ...]:
        """Return the ops of a type, as ``op_type_config`` matches it."""
        return self._where(lambda op: op.op_type == op_type)

    def get_matched_ops_for_op_name(self, pattern: str) -> tuple[OpInfo, ...]:
        """Return the ops whose name a regular expression matches as a whole, as ``op_name_config`` does.

        Raises:
            ValueError: the expression is invalid.
        """
        matches = _matcher(pattern)
        return self._where(lambda op: matches(op.op_name))

    def get_matched_ops_for_module_name(self, module_name: str) -> tuple[OpInfo, ...]:
        """Return the ops in modules whose path a regular expression matches as a whole.

        Raises:
            ValueError: the expression is invalid.
        """
        matches = _matcher(module_name)
        return self._where(lambda op: any(matches(context.module_name) for context in op.module_stack))

    def get_matched_ops_for_module_type(self, module_type: type[nn.Module] | str) -> tuple[OpInfo, ...]:
        """Return the ops in modules of a class, given as the class or its full name."""
        name = module_type if isinstance(module_type, str) else fqn(module_type)
        return self._where(lambda op: any(context.module_type == name for context in op.module_stack))

    def format_summary(self, colorize: bool | None = None) -> str:
        """Return the tree as text.

        Args:
            colorize: with terminal colours; None: only where the output is a terminal.
        """
        return format_summary(self.summary, colorize)

    def _where(self, predicate: Callable[[OpInfo], bool]) -> tuple[OpInfo, ...]:
        return tuple(op for op in self._ops if predicate(op))


def _check(model: Any, inputs: Any, execution_mode: Any, kwargs: Any) -> ExecutionMode:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.fx.GraphModule or torch.nn.Module, got {type(model).__name__}: {model!r}.")
    try:
        mode = ExecutionMode(execution_mode)
    except ValueError as error:
        raise InvalidExecutionModeError(execution_mode) from error
    if isinstance(inputs, (torch.Tensor, str, Mapping)):
        raise not_a_tuple(inputs)
    is_graph = isinstance(model, fx.GraphModule)
    if mode == ExecutionMode.EAGER and is_graph:
        raise TypeError(
            "Expected a torch.nn.Module for Eager execution_mode, got a GraphModule, which has no module calls left. "
            "Use execution_mode='graph'."
        )
    if inputs is None and not kwargs and not (is_graph and mode == ExecutionMode.GRAPH):
        raise ValueError(
            "example_inputs can only be None when the model is a GraphModule and execution_mode is 'graph'. Pass the "
            "model's inputs as a tuple."
        )
    return mode


def _graph_program(model: nn.Module, inputs: Any, kwargs: Any, dynamic_shapes: Any, no_grad: bool) -> Program:
    from bitwright.program.graph import capture_graph
    from bitwright.program.graph_program import build_program

    if isinstance(model, fx.GraphModule):
        return build_program(model, model)
    paths = tuple(path for path, _ in model.named_modules() if path)
    try:
        return capture_graph(model, inputs or (), kwargs, dynamic_shapes, no_grad, paths)[1]
    except RuntimeError:  # the boundary of a module that takes other objects than tensors cannot be kept
        return capture_graph(model, inputs or (), kwargs, dynamic_shapes, no_grad)[1]


def _frame_recorder(frames: dict[int, tuple[SourceFrame, ...]]) -> Callable[[Op], None]:
    def record(op: Op) -> None:
        frames[id(op)] = running_frames()

    return record


def _matcher(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no valid regular expression: {error}.") from error
    return lambda name: compiled.fullmatch(name) is not None
