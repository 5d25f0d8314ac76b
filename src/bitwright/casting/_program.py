"""What stands around the graph of an exported program: state, signature, example inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from ._cleanup import dtype_of

_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def check_program(program: object) -> None:
    """Check that a pass got what it works on.

    Raises:
        TypeError: ``program`` is no ``ExportedProgram``.
    """
    if isinstance(program, ExportedProgram):
        return
    remedy = "export it first with torch.export.export(model, example_inputs)"
    raise TypeError(f"Casting works on a torch.export.ExportedProgram, got {type(program).__name__}; {remedy}.")


def state_of(program: ExportedProgram, spec: InputSpec) -> Any:
    """Return the parameter, buffer or constant that the input ``spec`` stands for."""
    target = str(spec.target)
    return program.state_dict[target] if target in program.state_dict else program.constants[target]


def static_inputs(program: ExportedProgram) -> Iterator[tuple[Node, InputSpec, torch.Tensor]]:
    """Yield the placeholders of parameters, buffers and constant tensors, each with its spec and tensor."""
    for node, spec in _inputs(program):
        if spec.kind in _STATE_KINDS:
            state = state_of(program, spec)
            if isinstance(state, torch.Tensor):
                yield node, spec, state


def tokens(program: ExportedProgram) -> list[Node]:
    """Return the placeholders of effect tokens: empty float32 tensors that only order side effects."""
    return [node for node, spec in _inputs(program) if spec.kind == InputKind.TOKEN]


def user_inputs(program: ExportedProgram) -> list[Node]:
    """Return the placeholders of the user's inputs, in the order of the flattened arguments."""
    return [node for node, spec in _inputs(program) if spec.kind == InputKind.USER_INPUT]


def _inputs(program: ExportedProgram) -> Iterator[tuple[Node, InputSpec]]:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    return zip(placeholders, program.graph_signature.input_specs, strict=True)


def replace_state(program: ExportedProgram, replaced: Mapping[int, torch.Tensor]) -> None:
    """Put new tensors in place of old ones, found by identity; names that shared a tensor share the new one."""
    wrapped: dict[int, torch.Tensor] = {}
    for store in (program.state_dict, program.constants):
        for name, tensor in store.items():
            key = id(tensor)
            if key not in replaced:
                continue
            if key not in wrapped:
                wrapped[key] = _like(tensor, replaced[key])
            store[name] = wrapped[key]


def _like(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


def finish(program: ExportedProgram) -> None:
    """Make the program whole again after its graph was changed: signature, example inputs, generated code."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()
    _sync_outputs(program.graph, program.graph_signature)
    _sync_example_inputs(program)
    program.validate()  # type: ignore[no-untyped-call]


def _sync_outputs(graph: torch.fx.Graph, signature: ExportGraphSignature) -> None:
    results = graph.output_node().args[0]
    if not isinstance(results, tuple | list):
        raise TypeError(f"The graph returns {results!r}; an exported program returns a tuple.")
    for result, spec in zip(results, signature.output_specs, strict=True):
        if isinstance(result, Node) and isinstance(spec.arg, TensorArgument):
            spec.arg = dataclasses.replace(spec.arg, name=result.name)


def _sync_example_inputs(program: ExportedProgram) -> None:
    if program.example_inputs is None:
        return
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    cast = [
        leaf.to(dtype_of(node)) if isinstance(leaf, torch.Tensor) and dtype_of(node) is not None else leaf
        for leaf, node in zip(leaves, user_inputs(program), strict=True)
    ]
    program.example_inputs = pytree.tree_unflatten(cast, spec)
