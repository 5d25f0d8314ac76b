"""Largest magnitude of every float32 and integer value of a program, found by running it on example inputs.

Finite numbers that stand for infinity in masks are no magnitudes, as long as they come from a constant or an input:
what an operation computes beyond them is an overflow like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from ._cleanup import dtype_of
from ._numbers import STANDS_FOR_INFINITY
from ._program import state_of, user_inputs

Call = tuple[tuple[Any, ...], dict[str, Any]]


def peak_values(program: ExportedProgram, inputs: Any) -> dict[Node, float]:
    """Run ``program`` and return the largest finite magnitude of every float32 value and every integer tensor,
    sub-graphs included; what stands for infinity is left out, and so are integers among several results.

    Args:
        program: the program in float32.
        inputs: what one call takes (a tensor, a tuple of positional arguments, a mapping of arguments by name, or
            the pair of both), or an iterable of such calls, for example a data loader.

    Raises:
        ValueError: the inputs do not fit the signature that the program was exported with, or there are none.
    """
    peaks: dict[Node, float] = {}
    count = 0
    with torch.no_grad():
        for call in _calls(program, inputs):
            _check_tensors(program, call)
            _Recorder(program.graph_module, peaks).run(*_flat_inputs(program, call))
            count += 1
    if count == 0:
        raise ValueError("The example inputs hold no call: nothing was run, so no overflow could be found.")
    return peaks


class _Recorder(Interpreter):
    """Run a graph node by node and keep the largest finite magnitude of each float32 or integer result."""

    def __init__(self, module: GraphModule, peaks: dict[Node, float]) -> None:
        super().__init__(module)
        self._peaks = peaks
        self._masks: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 and leaf.numel():
                magnitude = leaf.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
                masked = magnitude >= STANDS_FOR_INFINITY
                if masked.any() and self._may_mask(n):
                    self._masks.add(n)
                    magnitude = magnitude.masked_fill(masked, 0.0)
                self._peaks[n] = max(self._peaks.get(n, 0.0), float(magnitude.max()))
        if isinstance(result, torch.Tensor) and not (result.is_floating_point() or result.is_complex()):
            self._record_integers(n, result)
        return result

    def _record_integers(self, node: Node, result: torch.Tensor) -> None:
        if result.numel() and result.dtype != torch.bool:
            low, high = torch.aminmax(result)
            self._peaks[node] = max(self._peaks.get(node, 0.0), abs(float(low)), abs(float(high)))

    def _may_mask(self, node: Node) -> bool:
        """Whether a number that stands for infinity was given to ``node``, and none was computed for it."""
        if node.op != "call_function":
            return True
        if any(self._peaks.get(source, 0.0) >= STANDS_FOR_INFINITY for source in node.all_input_nodes):
            return False
        scalars = (leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float))
        given = any(abs(scalar) >= STANDS_FOR_INFINITY for scalar in scalars)
        return given or not self._masks.isdisjoint(node.all_input_nodes)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator):
            args, kwargs = pytree.tree_map(self._recorded, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _recorded(self, argument: Any) -> Any:
        if not isinstance(argument, GraphModule):
            return argument
        peaks = self._peaks
        return lambda *operands: _Recorder(argument, peaks).run(*operands)


def _check_tensors(program: ExportedProgram, call: Call) -> None:
    """Check dtypes and sizes against those that the program was exported with; sizes that vary are not compared."""
    for leaf, node in zip(pytree.tree_leaves(call), user_inputs(program), strict=True):
        expected = node.meta.get("val")
        if not isinstance(leaf, torch.Tensor) or not isinstance(expected, torch.Tensor):
            continue
        fits = leaf.dtype == expected.dtype and leaf.ndim == expected.ndim
        sizes = zip(leaf.shape, expected.shape, strict=False)
        if not fits or any(isinstance(size, int) and size != given for given, size in sizes):
            raise ValueError(
                f"The example input for {node.name!r} is a {leaf.dtype} tensor of shape {tuple(leaf.shape)}; the "
                f"program was exported with {expected.dtype} of shape {tuple(expected.shape)}. Give inputs as for the "
                "program before the cast."
            )


def _flat_inputs(program: ExportedProgram, call: Call) -> list[Any]:
    leaves = iter(pytree.tree_leaves(call))
    flat: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            flat.append(next(leaves))
            continue
        if spec.kind == InputKind.TOKEN:
            flat.append(torch.empty(0))
            continue
        state = state_of(program, spec)
        # A graph that is not functional writes to its buffers; the program keeps its own.
        flat.append(state.clone() if spec.kind == InputKind.BUFFER and isinstance(state, torch.Tensor) else state)
    return flat


def _calls(program: ExportedProgram, inputs: Any) -> Iterator[Call]:
    call = _as_call(program, inputs)
    if call is not None:
        yield call
        return
    if isinstance(inputs, Mapping | tuple | str | torch.Tensor) or not isinstance(inputs, Iterable):
        raise ValueError(_mismatch(program, inputs))
    for entry in inputs:
        call = _as_call(program, entry)
        if call is None:
            raise ValueError(_mismatch(program, entry))
        yield call


def _as_call(program: ExportedProgram, inputs: Any) -> Call | None:
    """Return ``inputs`` as the arguments of one call, in the order of the signature; None when they do not fit it."""
    candidates: list[Call] = []
    if isinstance(inputs, Mapping):
        candidates.append(((), dict(inputs)))
    elif isinstance(inputs, tuple | list):
        candidates.append((tuple(inputs), {}))
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], Mapping):
            candidates.append((inputs[0], dict(inputs[1])))
    else:
        candidates.append(((inputs,), {}))
    for candidate in candidates:
        bound = _bound(program, *candidate)
        if bound is not None:
            return bound
    return None


def _bound(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    spec = program.call_spec.in_spec
    if spec is None:
        return args, kwargs
    positional, named = spec.children()
    rest = dict(kwargs)
    names = _argument_names(program)[len(args) : positional.num_children]
    if len(args) + len(names) != positional.num_children or any(name not in rest for name in names):
        return None
    args = (*args, *(rest.pop(name) for name in names))
    if set(rest) != set(named.context):
        return None
    call = (args, {name: rest[name] for name in named.context})
    leaves, expected = pytree.tree_leaves(call), user_inputs(program)
    if len(leaves) != len(expected):
        return None
    fits = (
        dtype_of(node) is None or isinstance(leaf, torch.Tensor) for leaf, node in zip(leaves, expected, strict=True)
    )
    return call if all(fits) else None


def _argument_names(program: ExportedProgram) -> list[str]:
    signature = program.module_call_graph[0].signature
    return list(signature.forward_arg_names or []) if signature is not None else []


def _mismatch(program: ExportedProgram, inputs: Any) -> str:
    is_tensor = isinstance(inputs, torch.Tensor)
    shown = f"{type(inputs).__name__} of shape {tuple(inputs.shape)}" if is_tensor else repr(inputs)
    return (
        f"Example inputs {shown[:200]} do not fit the program, whose arguments are "
        f"{', '.join(_argument_names(program)) or program.call_spec.in_spec}. Give the positional arguments as a "
        "tuple, the arguments by name as a mapping, or an iterable of these."
    )
