"""Running ExecuTorch programs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bitwright.export.conversion import OTHER_OPERATOR, ConversionError, plain_layout
from bitwright.export.extras import require
from bitwright.export.signatures import with_states_copied

__all__ = ["check", "kernels_lacking", "largest_inputs", "load", "run_executorch"]


def run_executorch(path: str | Path, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Run a program once with ExecuTorch's Python runtime.

    Args:
        path: the file.
        inputs: tensors in the order of the program's inputs, in any layout: ExecuTorch itself takes the memory of an
            input as the layout that the program was exported with, channels last or contiguous. What is no tensor is
            passed over, as in the file.

    Returns:
        The tensors among its outputs, in their order.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
        ConversionError: there is no whole program in the file, or it does not take the inputs.
    """
    require("executorch.kernels.quantized", "executorch", "Running ExecuTorch programs")
    try:
        method = load(path)
        outputs = method.execute(_in_layouts(path, [tensor.cpu() for tensor in _tensors(inputs)]))
        return [output.clone() for output in _tensors(outputs)]
    except RuntimeError as error:
        raise ConversionError(
            f"ExecuTorch's runtime cannot run {str(path)!r} on inputs of shape {_shapes(inputs)}: {error}. Write the "
            "file anew if it is damaged; a program takes contiguous tensors of the shapes that it was exported with."
        ) from error


def check(path: Path, program: torch.export.ExportedProgram, others: Sequence[Any], enough_db: float) -> None:
    """Run a file once: XNNPACK's runtime refuses some graphs that its partitioner took, and computes some wrong.

    Args:
        path: the file.
        program: what was written.
        others: positional and keyword inputs, several times, of other sizes than the program's example inputs, on
            which to run it as well.
        enough_db: ratio of signal to noise that the outputs must reach.

    Raises:
        ConversionError: the runtime refuses the file, has no kernel for an operator of it, or its output is not the
            exported program's.
    """
    try:
        right = all(_outputs_agree(path, program, inputs, enough_db) for inputs in (program.example_inputs, *others))
    except RuntimeError as error:
        if lacking := kernels_lacking(path):
            words = f"ExecuTorch's runtime has no kernel for {', '.join(lacking)}"
            raise ConversionError(f"{words}. {OTHER_OPERATOR}") from error
        if not others:
            raise
        raise ConversionError(
            f"dynamic_shapes allow sizes that the file does not take, because ExecuTorch keeps some to what it saw, "
            f"without a word: {error}. Give dynamic_shapes fewer dimensions."
        ) from error
    if not right:
        raise ConversionError(
            "ExecuTorch's runtime computes something else than the exported program. Try it with the float model: if "
            "that fails too, write the model with other operators, or choose another target; if not, leave the layers "
            "at fault out of the configuration."
        )


def _outputs_agree(path: Path, program: torch.export.ExportedProgram, inputs: Any, enough_db: float) -> bool:
    """Whether outputs are close enough; infinities and what is no number must be where they are in the program's."""
    args, kwargs = inputs
    expected = [tensor.double() for tensor in _tensors(with_states_copied(program)(*args, **kwargs))]
    found = [tensor.double() for tensor in run_executorch(path, tuple(tree_leaves(inputs)))]
    noise = sum(float(_difference(*pair).square().sum()) for pair in zip(expected, found, strict=True))
    signal = sum(float(tensor[tensor.isfinite()].square().sum()) for tensor in expected)
    return noise * 10 ** (enough_db / 10) <= signal


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What two tensors differ by; nothing where both are the same infinity, or no number."""
    alike = (one == other) | (one.isnan() & other.isnan())
    return torch.where(alike, 0.0, one - other)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Models may return numbers and nothing besides tensors."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def largest_inputs(program: torch.export.ExportedProgram, less: int = 0) -> Any:
    """Return the example inputs, repeated to the largest size of each dynamic dimension; None where all are fixed.

    Args:
        program: whose dimensions these are.
        less: how much less than the largest each is, if it is that large.

    Raises:
        ValueError: a dimension has no largest size.
    """
    leaves, structure = tree_flatten(program.example_inputs)
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    ranges = program.range_constraints.items()
    largest = {symbol: max(bounds.lower, bounds.upper - less) for symbol, bounds in ranges}
    dynamic = False
    for number, name in enumerate(program.graph_signature.user_inputs):
        value = placeholders[name].meta["val"] if name in placeholders else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if not isinstance(size, torch.SymInt):
                continue
            length = size.node.expr.xreplace(largest)
            if not length.is_Integer:
                raise ValueError(
                    f"ExecuTorch plans memory for the largest size of each dimension, but dynamic_shapes leaves "
                    f"dimension {axis} of input {number} unbounded. Give it a torch.export.Dim with a max."
                )
            leaf, dynamic = leaves[number], True
            larger = leaf.index_select(axis, torch.arange(int(length)) % leaf.shape[axis])
            leaves[number] = larger.contiguous(memory_format=_layout(leaf))
    return tree_unflatten(leaves, structure) if dynamic else None


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return which of the two layouts that programs take a tensor has."""
    plain = plain_layout(tensor)
    return torch.contiguous_format if plain.is_contiguous() else torch.channels_last


def _in_layouts(path: str | Path, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs in the layouts that a program was exported with: its runtime reads memory, and no strides."""
    layouts = [torch.contiguous_format] * len(inputs)
    if any(tensor.ndim == 4 for tensor in inputs):  # alone can be channels last
        plan = _plans(path)[0]
        orders = [getattr(plan.values[index].val, "dim_order", None) for index in plan.inputs]
        of_tensors = [list(order) == [0, 2, 3, 1] for order in orders if order is not None]
        for number, channels_last in enumerate(of_tensors[: len(inputs)]):
            layouts[number] = torch.channels_last if channels_last else torch.contiguous_format
    return [tensor.contiguous(memory_format=layout) for tensor, layout in zip(inputs, layouts, strict=True)]


def _plans(path: str | Path) -> list[Any]:
    """Return the execution plans of a program's file."""
    serialized = importlib.import_module("executorch.exir._serialize._program")
    plans: list[Any] = serialized.deserialize_pte_binary(Path(path).read_bytes()).program.execution_plan
    return plans


def _shapes(inputs: Any) -> str:
    return ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)) or "none"


def load(path: str | Path) -> Any:
    """Return the method of a program's file; a RuntimeError if the runtime lacks an operator of it."""
    return _runtime().load_program(str(path)).load_method("forward")


def kernels_lacking(path: str | Path) -> list[str]:
    """Return the operators of a program's file that the runtime has no kernel for, which it tells by a number alone."""
    kernels, lacking = _runtime().operator_registry.operator_names, set()
    with contextlib.suppress(Exception):  # of a damaged file, which the runtime's own error is about
        for op in (op for plan in _plans(path) for op in plan.operators):
            name = f"{op.name}.{op.overload}" if op.overload else op.name
            lacking |= {name} - set(kernels)
    return sorted(lacking)


def _runtime() -> Any:
    return require("executorch.runtime", "executorch", "Running ExecuTorch programs").Runtime.get()
