"""Inputs and outputs of exported programs that converters have no words for: no tensors, and one tensor twice."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, TensorArgument
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_is_leaf

from bitwright.errors import BitwrightWarning
from bitwright.planning import Problem, Severity

from .conversion import ConversionError
from .graph_edits import call

__all__ = [
    "drop_constants",
    "forget_written_parameters",
    "only_tensors",
    "refuse_numbers",
    "tensors_apart",
    "warn_of_lost_states",
    "with_states_copied",
    "written_states",
    "written_tensors",
]


def refuse_numbers(program: torch.export.ExportedProgram, converter: str) -> None:
    """Refuse a program that returns numbers or strings.

    Args:
        program: the program.
        converter: its name, to begin the message with.

    Raises:
        ConversionError: the program returns something that is neither a tensor nor None.
    """
    for number, output in enumerate(_outputs(program)):
        if output is not None and not (isinstance(output, fx.Node) and isinstance(output.meta["val"], torch.Tensor)):
            what = "a size" if isinstance(output, fx.Node) else repr(output)
            message = f"{converter} cannot take this model: its output {number} is {what}. Return tensors only."
            raise ConversionError(message, (Problem("target", "the model itself", message, Severity.ERROR),))


def drop_constants(program: torch.export.ExportedProgram) -> None:
    """Let a program take tensors only, in place; what else it was captured with stays as it was then.

    What it writes to its inputs is lost: a file has no tensor of its caller's.
    """
    signature, interface = program.graph_signature, program.module_call_graph[0].signature
    constants = {spec.arg.name for spec in signature.input_specs if isinstance(spec.arg, ConstantArgument)}
    inputs = only_tensors(program.example_inputs)
    leaves, structure = tree_flatten(inputs)
    if constants and len(leaves) == len(signature.input_specs) - len(constants) - len(_states(program)):
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name in constants:
                program.graph.erase_node(node)
        signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name not in constants]
        program._example_inputs = inputs
        assert interface is not None
        interface.in_spec, interface.forward_arg_names = structure, None
    _copy_written_inputs(program)
    program.graph_module.recompile()


def _copy_written_inputs(program: torch.export.ExportedProgram) -> None:
    """Let a program that writes to its inputs write to copies of them."""
    graph, given = program.graph, set(program.graph_signature.user_inputs)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in written_tensors(graph):
        if node.op != "placeholder" or node.name not in given:
            continue
        with graph.inserting_before(first):
            copied = call(graph, torch.ops.aten.clone.default, node)
        node.replace_all_uses_with(copied, delete_user_cb=partial(operator.is_not, copied))


def written_tensors(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes whose memory a graph writes to, each once, behind all views of it."""
    return list(dict.fromkeys(_viewed(node.args[0]) for node in graph.nodes if _writes(node)))


def _writes(node: Any) -> bool:
    """Whether an operator writes to its first argument, as those whose names end with an underscore do."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and bool(node.target._schema.is_mutable) and isinstance(node.args[0], fx.Node)


def _viewed(node: Any) -> fx.Node:
    """What a tensor shares its memory with, behind all views, and operators that return what they wrote to."""
    while node.target is operator.getitem or _returns_memory(node):
        node = node.args[0]
    found: fx.Node = node
    return found


def _returns_memory(node: Any) -> bool:
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and any(value.alias_info is not None for value in node.target._schema.returns)


def only_tensors(inputs: Any) -> Any:
    """Return positional and keyword inputs without what is no tensor, in tuples, lists and dictionaries too."""
    if isinstance(inputs, dict):
        return {name: only_tensors(value) for name, value in inputs.items() if _holds_tensors(value)}
    if type(inputs) in (tuple, list):
        return type(inputs)(only_tensors(value) for value in inputs if _holds_tensors(value))
    return inputs


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container, which keeps its place though it be empty."""
    return isinstance(value, torch.Tensor | tuple | list | dict) or not tree_is_leaf(value)


def _states(program: torch.export.ExportedProgram) -> list[InputSpec]:
    return [spec for spec in program.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT]


def tensors_apart(program: torch.export.ExportedProgram) -> None:
    """Leave out outputs that are None, and make tensors that are returned before others, in place.

    The second of two equal outputs would be lost; a maximum of it and itself is what no optimizer takes for the same.

    Args:
        program: whose signature then has fewer outputs than its Python form.
    """
    aten, graph, signature = torch.ops.aten, program.graph, program.graph_signature
    output, latest = graph.output_node(), dict[Any, Any]()
    kept, specs = list[Any](), list[Any]()
    for value, spec in zip(_outputs(program), signature.output_specs, strict=True):
        if value is None:
            continue
        again = value in latest
        if again:
            with graph.inserting_before(output):
                either = aten.logical_or if value.meta["val"].dtype == torch.bool else aten.maximum
                same = call(graph, either.default, latest[value], latest[value])
        latest[value] = same if again else value
        kept.append(latest[value])
        specs.append(dataclasses.replace(spec, arg=TensorArgument(same.name)) if again else spec)
    output.args = (tuple(kept),)
    signature.output_specs[:] = specs


def forget_written_parameters(program: torch.export.ExportedProgram) -> list[str]:
    """Let each call of a program begin with the parameters that it has, in place; what it writes to them ends with it.

    Args:
        program: whose signature then has fewer outputs.

    Returns:
        The names of the parameters that it writes to.
    """
    output, signature = program.graph.output_node(), program.graph_signature
    pairs = list(zip(_outputs(program), signature.output_specs, strict=True))
    written = [str(spec.target) for _, spec in pairs if spec.kind == OutputKind.PARAMETER_MUTATION]
    pairs = [(value, spec) for value, spec in pairs if spec.kind != OutputKind.PARAMETER_MUTATION]
    output.args = (tuple(value for value, _ in pairs),)
    signature.output_specs[:] = [spec for _, spec in pairs]
    return written


def written_states(program: torch.export.ExportedProgram) -> list[str]:
    """Return the names of the buffers and parameters by which a call of a program changes the outputs of later ones.

    Not those that it only fills, nor counters of calls that nothing else is computed from.

    Args:
        program: from ``torch.export``, or decomposed since.
    """
    read = {node.name for node in program.graph.find_nodes(op="placeholder") if any(map(_reads, node.users))}
    reaching = {node.name for node in _computed_from(program)}
    return [state for name, state in _states_to_write(program).items() if name in read & reaching]


def _computed_from(program: torch.export.ExportedProgram) -> set[fx.Node]:
    """Return what the outputs of a program are computed from, in this call and in those before it."""
    signature, writers = program.graph_signature, dict[fx.Node, list[fx.Node]]()
    for node in filter(_writes, program.graph.nodes):
        writers.setdefault(_viewed(node.args[0]), []).append(node)
    kept, mutated = dict[str, fx.Node](), {**signature.buffers_to_mutate, **signature.parameters_to_mutate}
    left = list[fx.Node]()
    for value in filter(lambda value: isinstance(value, fx.Node), _outputs(program)):
        if value.name in mutated:
            kept[mutated[value.name]] = value
        if value.name in signature.user_outputs:
            left.append(value)
    states = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    found = set[fx.Node]()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes + writers.get(_viewed(node), [])
            left += [kept[state] for state in [states.get(node.name)] if state in kept]
    return found


def with_states_copied(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    """Return what calls a program; it writes to copies of its states, which may be the user's own tensors."""
    module = program.module(check_guards=False)  # checks may be of inputs that were taken away
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    written = {name: tensors[name] for name in _states_to_write(program).values() if name in tensors}

    def run(*args: Any, **kwargs: Any) -> Any:
        copies = {name: tensor.detach().clone() for name, tensor in written.items()}
        return functional_call(module, copies, args, kwargs)

    return run


def _states_to_write(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Map placeholders to the buffers and parameters that a program writes to."""
    signature = program.graph_signature
    in_place = {node.name for node in written_tensors(program.graph)}
    as_outputs = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    states = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    return {name: state for name, state in states.items() if name in in_place or state in as_outputs}


def _reads(node: fx.Node) -> bool:
    return node.target is not torch.ops.aten.copy_.default


def warn_of_lost_states(names: Sequence[str], form: str) -> None:
    """Warn of what a model writes to for its next call, where a file does not keep it.

    Args:
        names: of the buffers and parameters; nothing is said of none.
        form: what the file is called.
    """
    if names:
        warnings.warn(
            f"The model writes to its state {', '.join(map(repr, names))} when it is called, and {form} keeps nothing "
            "for the next call: each call begins with the values at export. Let the model take such tensors as inputs "
            "and return the new ones, or write it for ExecuTorch or Core AI, whose files have states.",
            BitwrightWarning,
            stacklevel=2,
        )


def _outputs(program: torch.export.ExportedProgram) -> tuple[Any, ...]:
    outputs: Any = program.graph.output_node().args[0]
    return tuple(outputs)
