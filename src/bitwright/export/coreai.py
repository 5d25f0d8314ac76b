"""Core AI: an ``.aimodel`` made by coreai-torch, and its runtime."""

from __future__ import annotations

import contextlib
import io
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._decomp import decomposition_table
from torch.fx.experimental.symbolic_shapes import statically_known_true

from bitwright._utils.files import new_file_atomically
from bitwright.common import ExportBackend

from .attention import zero_where_nothing_is_seen
from .averages import average_in_order
from .complex_numbers import complex_nodes, without_complex_numbers
from .constants import compute_beforehand, remove_unread_sparse_states
from .conversion import (
    OTHER_OPERATOR,
    captured,
    converting,
    finalized_copy,
    module_path,
    places_by_operator,
    refuse_missing,
)
from .coreai_casts import keep_casts
from .coreai_decompositions import RIGHT_IN_COREAI
from .coreai_norms import NORMS_IN_ARITHMETIC, give_parameters
from .coreai_products import keep_products_apart, lay_rows_in_order, widen_products
from .coreai_runtime import run_coreai
from .coreai_views import unsqueeze_views
from .decomposing import decomposed
from .devices import all_on_cpu
from .experts import spell_out_experts, spell_out_split_experts
from .extras import require
from .graph_edits import erase_with_what_it_reads, half_result, widen
from .lacking import LACKING
from .lacking_basics import LACKING_BASICS
from .lost_sizes import sizes_kept
from .numbers_alone import fill_with_tensors, give_numbers_a_dimension
from .pool_places import spell_out_places
from .repeated_calls import merge_repeated_calls
from .signatures import drop_constants, forget_written_parameters, refuse_numbers, tensors_apart
from .sorts import spell_out_dynamic_sorts

__all__ = ["check_coreai_operators", "export_coreai", "run_coreai"]

_REMOVED = ("aten._assert_", "aten.sym_constrain_range")
"""Operators that coreai-torch takes out before it converts."""
_LARGE = 4096
"""Float tensors of as many elements are weights, whose values decide nothing in a conversion."""


def export_coreai(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    bfloat16_kernels: bool = False,
) -> Path:
    """Write a prepared model as a Core AI model.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs.
        path: the ``.aimodel`` folder to write; it must not exist.
        example_kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``.
        bfloat16_kernels: leave products of bfloat16 matrices to the runtime's own kernels. False has them added up in
            float32 between casts, as in PyTorch: the runtime's kernels on the CPU round at each step.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: the coreai extra is not installed.
        FileExistsError: ``path`` exists.
        ValueError: Core AI cannot hold a weight or an activation.
        NotImplementedError: activations whose parameters are computed at run time.
        ConversionError: torch.export or coreai-torch cannot take the model.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        OSError: the folder cannot be written.
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"{str(target)!r} exists already; give a path that does not.")
    require("coreai_torch", "coreai", "Export to Core AI")
    model, example_inputs, example_kwargs = all_on_cpu(model, example_inputs, example_kwargs)
    finalized = finalized_copy(model, ExportBackend.CoreAI)
    program = captured(finalized, example_inputs, example_kwargs, dynamic_shapes)
    average_in_order(program)
    zero_where_nothing_is_seen(program.graph_module)
    program = _decomposed(program)
    if not bfloat16_kernels:
        widen_products(program.graph)
        program.graph_module.recompile()
    with converting("coreai-torch"):
        _name_palettes(program)
        converted = _converted(program)
        if hasattr(converted, "optimize"):
            converted.optimize()
    with new_file_atomically(target) as part, converting("coreai-torch"):
        _try_to_write(converted, Path(part).with_suffix(".try"))
        converted.save_asset(Path(part))
    return target


def _try_to_write(converted: Any, path: Path) -> None:
    """Raise an ``OSError`` where the disk has no room for a program: LLVM's own writer ends the process there."""
    bytecode = io.BytesIO()
    converted._module._mlir_module.operation.write_bytecode(bytecode)
    path.write_bytes(bytecode.getbuffer())
    path.unlink()


def check_coreai_operators(program: torch.export.ExportedProgram) -> None:
    """Check that coreai-torch translates a captured float model, without its large weights.

    Args:
        program: changed.

    Raises:
        MissingExtraError: the coreai extra is not installed.
        ConversionError: coreai-torch cannot take it; with a problem for each operator.
    """
    program = _decomposed(program)
    for name, tensor in program.state_dict.items():
        if tensor.is_floating_point() and tensor.numel() >= _LARGE:
            program.state_dict[name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    with converting("coreai-torch", OTHER_OPERATOR):
        _converted(program)


def _converted(program: torch.export.ExportedProgram) -> Any:
    """The program as coreai-torch's, which knows the numbers of its operations.

    The converter's own default writes the lines of Python behind every operation into the file as well, with the paths
    of the machine. In a recurrent layer, whose steps follow one another in the program, they are half of it.
    """
    coreai_torch = require("coreai_torch", "coreai", "Export to Core AI")
    converter = coreai_torch.TorchConverter(mode=coreai_torch.TorchConverter.Mode.RELEASE)
    converter.add_exported_program(program)
    return converter.to_coreai()


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in the operators that coreai-torch translates.

    Raises:
        ConversionError: it does not translate all of them, or not for all sizes.
    """
    with sizes_kept(program, "coreai-torch"):
        program = _in_known_operators(program)
    for assertion in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        erase_with_what_it_reads(assertion)  # coreai-torch leaves what it reads, such as places in memory
    spell_out_places(program.graph_module)
    compute_beforehand(program, set(_lacking(program)).__contains__)
    lacking = _lacking(program)
    missing = places_by_operator(lacking)
    for node in [node for node in complex_nodes(program) if node not in lacking]:  # which end the process
        missing.setdefault(f"{node.target} with complex numbers", []).append(module_path(node))
    for pool in program.graph.find_nodes(op="call_function", target=torch.ops.aten.max_pool2d_with_indices.default):
        if any(user.args[1] == 1 and user.users for user in pool.users):
            missing.setdefault("aten.max_pool2d_with_indices.default with its indices", []).append(module_path(pool))
    refuse_missing("coreai-torch", missing)
    refuse_numbers(program, "coreai-torch")
    tensors_apart(program)
    _tell_of_states(program)
    give_numbers_a_dimension(program.graph)
    merge_repeated_calls(program)
    give_parameters(program.graph)
    keep_casts(program.graph)
    _largest_of_smallest(program.graph)
    _remainders_of_quotients(program.graph)
    _widen_halves(program.graph_module)
    keep_products_apart(program.graph)
    unsqueeze_views(program.graph)
    program.graph_module.recompile()
    return program


def _in_known_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without operators that coreai-torch lacks, as far as they can be written with others."""
    coreai_torch = require("coreai_torch", "coreai", "Export to Core AI")
    drop_constants(program)
    remove_unread_sparse_states(program)
    fill_with_tensors(program.graph)
    with converting("torch.export"):
        program = without_complex_numbers(program) or program
    spell_out_experts(program.graph_module)
    spell_out_split_experts(program.graph_module)
    spell_out_dynamic_sorts(program.graph_module)
    lay_rows_in_order(program.graph)
    table: dict[Any, Any] = {**coreai_torch.get_decomp_table(), **NORMS_IN_ARITHMETIC, **RIGHT_IN_COREAI}
    with converting("torch.export"):
        program = decomposed(program, table)
    with contextlib.suppress(Exception):  # of PyTorch's decompositions, some of which fail: the operators are lacking
        while more := {op: made for op, made in _decompositions(_lacking(program)) if op not in table}:
            table |= more
            program = decomposed(program, table)
    return program


def _tell_of_states(program: torch.export.ExportedProgram) -> None:
    """Warn of what a file does not keep of tensors that the model writes to."""
    if parameters := forget_written_parameters(program):
        warnings.warn(
            f"The model writes to its parameters {', '.join(parameters)} when it is called. In the file each call "
            "begins with the parameters as they are now.",
            UserWarning,
            stacklevel=2,
        )
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    begun = [name for name, buffer in signature.inputs_to_buffers.items()
             if buffer in written and bool(_stored(program, buffer).any())]  # fmt: skip
    if begun:
        warnings.warn(
            f"The states {', '.join(begun)} of the model do not begin with zeros, and a Core AI file holds no values "
            "of states: pass them with the first call, such as run_coreai(path, inputs, states={...}).",
            UserWarning,
            stacklevel=2,
        )


def _stored(program: torch.export.ExportedProgram, buffer: str) -> torch.Tensor:
    stored: Any = program.state_dict.get(buffer)
    if stored is None:
        stored = program.constants[buffer]
    values: torch.Tensor = stored
    return values


def _largest_of_smallest(graph: torch.fx.Graph) -> None:
    """Write the larger of two sizes with the smaller one, in place; coreai-torch has that alone."""
    for node in graph.find_nodes(op="call_function", target=torch.sym_max):
        one, other = node.args
        values = [size.meta["val"] if isinstance(size, torch.fx.Node) else size for size in (one, other)]
        with graph.inserting_before(node):
            total = graph.call_function(operator.add, (one, other))
            smaller = graph.call_function(torch.sym_min, (one, other))
            larger = graph.call_function(operator.sub, (total, smaller))
        total.meta, smaller.meta = {"val": values[0] + values[1]}, {"val": torch.sym_min(*values)}  # type: ignore[no-untyped-call]
        larger.meta = dict(node.meta)
        node.replace_all_uses_with(larger)
        graph.erase_node(node)


def _remainders_of_quotients(graph: torch.fx.Graph) -> None:
    """Write remainders of sizes that may be negative with quotients, in place, as of ``-size % 4``.

    Core AI's runtime gives a remainder the sign of what was divided, and rounds quotients down as Python does.
    """
    for node in graph.find_nodes(op="call_function", target=operator.mod):
        divided, by = node.args
        value, divisor = (size.meta["val"] if isinstance(size, torch.fx.Node) else size for size in (divided, by))
        if isinstance(node.meta["val"], torch.Tensor) or statically_known_true(value >= 0):
            continue
        with graph.inserting_before(node):
            quotient = graph.call_function(operator.floordiv, (divided, by))
            whole = graph.call_function(operator.mul, (quotient, by))
            remainder = graph.call_function(operator.sub, (divided, whole))
        quotient.meta, whole.meta = {"val": value // divisor}, {"val": value // divisor * divisor}
        remainder.meta = dict(node.meta)
        node.replace_all_uses_with(remainder)
        graph.erase_node(node)


def _widen_halves(module: torch.fx.GraphModule) -> None:
    """Let batch norms and running sums of halves compute in float32, and fill bfloat16 tensors in float32, in place.

    coreai-torch computes the first and the last that way, but then finds that the types of their results are not
    PyTorch's. Core AI's runtime rounds a running sum at every step, and PyTorch once.
    """
    aten = torch.ops.aten
    for op in (aten._native_batch_norm_legit_no_training.default, aten.cumsum.default):
        for node in module.graph.find_nodes(op="call_function", target=op):
            if half_result(node) is not None:
                widen(module.graph, node)
    for node in module.graph.find_nodes(op="call_function", target=aten.full.default):
        if node.meta["val"].dtype == torch.bfloat16:
            _fill_in_float32(module.graph, node)
    module.recompile()


def _fill_in_float32(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Let a tensor be filled in float32, and cast."""
    name = node.name
    with graph.inserting_after(node):
        rounded = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": node.meta["val"].dtype})
    rounded.meta = dict(node.meta)
    node.kwargs, node.meta = {**node.kwargs, "dtype": torch.float32}, {**node.meta, "val": node.meta["val"].float()}
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    node._rename(f"{name}_float32")
    rounded._rename(name)  # the program's signature calls outputs by it


def _decompositions(calls: Iterable[torch.fx.Node]) -> Iterator[tuple[Any, Any]]:
    """What to make of operators: ours; or PyTorch's decompositions of them, and of its primitives what they compute."""
    for node in calls:
        op: Any = node.target
        if isinstance(op, torch._ops.HigherOrderOperator):
            continue
        ours = LACKING.get(op) or LACKING_BASICS.get(op)
        if ours is not None:
            yield op, ours
            continue
        packet, origin = op.overloadpacket, node.meta.get("original_aten", op).overloadpacket
        if packet.__name__.replace("_", "") == origin.__name__.replace("_", "") and packet is not origin:
            continue  # a primitive that computes the operator that became it
        made = getattr(op, "impl_aten", None) or decomposition_table.get(op)
        if made is not None:
            yield op, made


def _lacking(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Calls of PyTorch's operators, on graphs too, that coreai-torch's registries lack."""
    module = require("coreai_torch._aten_to_core", "coreai", "Export to Core AI")
    registry, of_graphs = module._aten_to_core_resolver, module._higher_order_resolver
    lacking = []
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and str(node.target) not in of_graphs:
            lacking.append(node)
        op = str(node.target)
        of_torch = node.op == "call_function" and op.startswith(("aten.", "prims."))
        if of_torch and not op.startswith(_REMOVED) and op.removeprefix("aten.") not in registry:
            lacking.append(node)
    return lacking


def _name_palettes(program: torch.export.ExportedProgram) -> None:
    """Give operands of palettes the names by which coreai-torch tells them apart.

    It takes the first one whose name contains "lut" for the table, which names of modules such as "convolution" do.
    """
    inputs = {spec.arg.name: spec.arg for spec in program.graph_signature.input_specs}
    named: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or str(node.target) != "coreai.lut_to_dense.default":
            continue
        for operand, name in zip(node.args[:2], ("indices", "lut"), strict=True):
            if operand.op == "placeholder" and operand not in named:
                argument = inputs[operand.name]
                operand._rename(f"palette_{len(named)}_{name}")
                argument.name = operand.target = operand.name
                named.add(operand)
