"""Writing ExecuTorch programs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._decomp import core_aten_decompositions

from bitwright._utils.files import new_file_atomically
from bitwright.artifact import CompressedTensor
from bitwright.artifact.sites import activation_simulators
from bitwright.export.complex_numbers import calls_on_complex_numbers, without_complex_numbers
from bitwright.export.constants import compute_beforehand, primitives, remove_unread_sparse_states
from bitwright.export.conversion import (
    OTHER_OPERATOR,
    ConversionError,
    captured,
    converting,
    module_path,
    own_warnings_passed_on,
    places_by_operator,
    refuse_missing,
)
from bitwright.export.decomposing import decomposed
from bitwright.export.devices import all_on_cpu
from bitwright.export.experts import spell_out_experts, spell_out_split_experts
from bitwright.export.extras import require
from bitwright.export.lacking import LACKING, without_lacking
from bitwright.export.lacking_basics import LACKING_BASICS
from bitwright.export.lowering import lower
from bitwright.export.numbers_alone import give_numbers_a_dimension
from bitwright.export.signatures import drop_constants, only_tensors, with_states_copied
from bitwright.export.sorts import spell_out_sorts
from bitwright.program.float_graph import same_numbers
from bitwright.program.protect import preserved_state

from .activations import ActivationStandIns, activation_form, saturates_as_int8
from .constants import constants_for_each_use
from .graph import (
    batches_for_products,
    dequantize_for_each_reader,
    dequantize_in_floats,
    drop_assertions_of_values,
    drop_identities,
    drop_unread_addends,
    reshape_behind_attention,
    spell_out_batch_norms,
    spell_out_crops,
    spell_out_gelu,
    spell_out_prelu,
    spell_out_remainders,
)
from .half import sum_in_float32
from .integers import INTEGERS
from .layers import lower_dynamic_activations, multiply_by_codes, products_as_layers
from .orders import turn_dynamic_inputs
from .repetition import less_repetition
from .runtime import check, kernels_lacking, largest_inputs, load
from .volume_pools import VOLUME_POOLS
from .volumes import flatten_convolutions
from .weights import dense_weight, int8_weight

__all__ = ["check_executorch_operators", "export_executorch"]

_Way: TypeAlias = tuple[str, Callable[[str, CompressedTensor[Any]], nn.Module], dict[str, Any] | None]

_aten = torch.ops.aten
_KERNELS = (_aten.cdist.default, _aten._cdist_forward.default, _aten.cross_entropy_loss.default)
"""What ExecuTorch does not lack of what other converters lack."""
_LACKING = {
    op: made for op, made in {**LACKING, **LACKING_BASICS, **VOLUME_POOLS, **INTEGERS}.items() if op not in _KERNELS
}

_logger = logging.getLogger(__name__)


def export_executorch(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """Write a prepared model as an ExecuTorch program.

    Symmetric per-tensor and per-channel integer weights and per-tensor int8 activations become the quantize and
    dequantize ops that XNNPACK fuses into its int8 kernels. Activations whose parameters are computed at run time, per
    tensor or per token, are quantized by the linear layers that read them, with int8 or int4 weights. Other weights are
    stored dense with their decoded values. Where one calibrated activation does not fill int8 (fewer bits, a clipped
    range, per channel), all of them are written as the arithmetic of their simulation, because XNNPACK rejects layers
    that are int8 on one side only: as exact, but not as fast. The file is run once; where XNNPACK refuses it or
    computes something else, it is given less of the model.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs. ExecuTorch's runtimes read the memory of an input in the layout of the
            example (channels last, or contiguous), without a check.
        path: the file to write.
        example_kwargs: keyword inputs. The program takes tensors by position: these come after the positional ones.
        dynamic_shapes: as for ``torch.export``; ExecuTorch plans memory for the largest size of each dimension, so
            each needs a ``max``.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
        ValueError: an activation has no form there, or a dynamic dimension has no largest size.
        ConversionError: torch.export or ExecuTorch cannot take the model, or it convolves in three dimensions
            whose depth is dynamic.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        OSError: the file cannot be written; an old one stays.
    """
    _require_executorch()
    model, example_inputs, example_kwargs = all_on_cpu(model, example_inputs, example_kwargs)
    simulators = list(activation_simulators(model).values())
    ways: tuple[_Way, ...] = (
        ("int8 weights, whole sub-graphs for XNNPACK", int8_weight, {}),
        ("int8 weights, single ops for XNNPACK", int8_weight, {"per_op_mode": True}),
        ("dense weights, whole sub-graphs for XNNPACK", dense_weight, {}),
        ("dense weights, nothing for XNNPACK", dense_weight, None),
    )
    exact = not simulators and all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
    for number, (what, weight, options) in enumerate(ways):
        try:
            program, by_codes, others = _program(model, weight, example_inputs, example_kwargs, dynamic_shapes)
            with converting("ExecuTorch"):
                lowered = _lowered(program, [] if options is None else _partitioners(by_codes, **options))
            with new_file_atomically(path) as part, converting("ExecuTorch"):
                Path(part).write_bytes(lowered)
                check(Path(part), program, others, 60 if exact else 15)
        except ConversionError as error:
            if number + 1 == len(ways):
                raise
            _logger.warning("%s did not work (%s); next: %s.", what, error, ways[number + 1][0])
        else:
            break
    return Path(path)


def _program(
    model: nn.Module,
    weight: Callable[[str, CompressedTensor[Any]], nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> tuple[torch.export.ExportedProgram, bool, list[Any]]:
    """What is to be written, whether layers multiply with a weight computed from codes, and inputs of other sizes."""
    simulators = activation_simulators(model).values()
    calibrated = [simulator for simulator in simulators if activation_form(simulator) != "dynamic"]
    activations = ActivationStandIns(static=all(map(saturates_as_int8, calibrated)))
    program, others = _captured(lower(model, weight, activations).model.eval(), args, kwargs, dynamic_shapes)
    program = _spelled_out(program)
    drop_identities(program.graph_module)
    dequantize_for_each_reader(program.graph_module)
    products_as_layers(program)
    batches_for_products(program.graph_module)
    dequantize_in_floats(program.graph_module)
    lower_dynamic_activations(program, activations.dynamic)
    reshape_behind_attention(program.graph_module)
    by_codes = multiply_by_codes(program)
    constants_for_each_use(program)
    return program, by_codes, only_tensors(others)


def _spelled_out(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Write with other operators what ExecuTorch lacks, or computes less exactly; ``program`` may be changed."""
    drop_constants(program)  # while it still writes in place to its inputs, if it does
    if not _has_kernels_for_complex(program):
        program = without_complex_numbers(program) or program
    drop_assertions_of_values(program.graph_module)
    program = without_lacking(program, _LACKING) or program
    remove_unread_sparse_states(program)
    compute_beforehand(program, _lacks)
    flatten_convolutions(program)
    turn_dynamic_inputs(program)
    give_numbers_a_dimension(program.graph)
    spell_out_experts(program.graph_module)
    spell_out_split_experts(program.graph_module)
    sum_in_float32(program.graph_module)
    drop_unread_addends(program.graph_module)
    spell_out_gelu(program.graph_module)
    spell_out_prelu(program.graph_module)
    spell_out_crops(program.graph_module)
    spell_out_remainders(program.graph_module)
    spell_out_sorts(program.graph_module)
    spell_out_batch_norms(program)
    return program


def _has_kernels_for_complex(program: torch.export.ExportedProgram) -> bool:
    """Whether ExecuTorch computes with the complex numbers of a program: it has Fourier transforms, and little else."""
    known = {_aten.view_as_real.default, _aten.view_as_complex.default}
    return all(node.target in known or "fft" in str(node.target) for node in calls_on_complex_numbers(program))


def _lacks(node: torch.fx.Node) -> bool:
    """Whether ExecuTorch has no kernel for an operator of PyTorch: it is not of the core, nor made of such."""
    computes = [op for op in primitives(node) if all(value.alias_info is None for value in op._schema.returns)]
    return any(torch.Tag.core not in op.tags and op not in _decomposed_to_core() for op in computes)


@functools.cache
def _decomposed_to_core() -> frozenset[Any]:
    return frozenset(core_aten_decompositions())


def check_executorch_operators(program: torch.export.ExportedProgram) -> None:
    """Check that ExecuTorch lowers a captured float model without XNNPACK, and has kernels for what comes out.

    Args:
        program: the float model; changed.

    Raises:
        MissingExtraError: ExecuTorch is not installed.
        ConversionError: it does not; with a problem for each operator that it lacks.
    """
    _require_executorch()
    with converting("ExecuTorch", OTHER_OPERATOR):
        largest_inputs(program)  # which says what dynamic shapes lack
        program = _spelled_out(program)
        try:
            lowered = _lowered(program, [])
        except Exception:
            refuse_missing("ExecuTorch", _missing(program))  # all of them; ExecuTorch names the first
            raise
    with tempfile.TemporaryDirectory() as folder, converting("ExecuTorch", OTHER_OPERATOR):
        path = Path(folder) / "model.pte"
        path.write_bytes(lowered)
        try:
            load(path)
        except RuntimeError:
            refuse_missing("ExecuTorch", _calls_of(program, kernels_lacking(path)), "kernel for")
            raise


def _calls_of(program: torch.export.ExportedProgram, kernels: list[str]) -> dict[str, list[str]]:
    """Module paths by kernel, of what calls it in a program that was lowered."""
    calls = [node for node in decomposed(program).graph.nodes if isinstance(node.target, torch._ops.OpOverload)]

    def paths(name: str) -> list[str]:
        return [module_path(node) for node in calls if node.target.name().split(".")[0] == name]

    return {kernel: paths(kernel.split(".")[0]) or [""] for kernel in kernels}


def _missing(program: torch.export.ExportedProgram) -> dict[str, list[str]]:
    """Module paths by operator, of those that ExecuTorch has no name for."""
    verifier = importlib.import_module("executorch.exir.verification.verifier").EXIRATenDialectVerifier()
    asserts = importlib.import_module("executorch.exir.passes.remove_graph_asserts_pass")
    core = decomposed(program).graph_module
    asserts.RemoveNonCoreAtenOpGraphAssertsPass()(core)  # as ExecuTorch does before it asks

    def is_unknown(node: torch.fx.Node) -> bool:
        try:
            verifier.check_valid_op(node.target)
        except Exception:  # a class of ExecuTorch's own, for each operator that it does not know
            return True
        return False

    return places_by_operator(filter(is_unknown, core.graph.nodes))


def _require_executorch() -> None:
    require("executorch.exir", "executorch", "Export to ExecuTorch")
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the quantized_decomposed ops
    # What XNNPACK leaves over runs on these kernels.
    require("executorch.kernels.quantized", "executorch", "Export to ExecuTorch")


def _captured(model: nn.Module, args: tuple[Any, ...], kwargs: Any, dynamic_shapes: Any) -> tuple[Any, list[Any]]:
    """What torch.export captures, and inputs of other sizes that the file is to be run on.

    ExecuTorch keeps the choices that PyTorch makes for the sizes of the examples. A convolution of fewer than 16 images
    takes another way than one of more, for example, and a file that was written from two images would take 15 at most,
    so that the largest sizes are examples. Where the model takes a branch for these that does not hold for others, as
    without padding, the sizes before them are.
    """
    given = (args, dict(kwargs or {}))
    with own_warnings_passed_on():
        program = captured(model, args, kwargs, dynamic_shapes)
        largest = largest_inputs(program)
        if largest is None:
            return program, []
        try:
            return captured(model, largest[0], largest[1], dynamic_shapes), [given]
        except ConversionError:
            args, kwargs = largest_inputs(program, 1)
            with contextlib.suppress(Exception):  # whatever it raises at the largest sizes
                program = captured(model, args, kwargs, dynamic_shapes)
                if _computes_as(program, model, *largest):
                    return program, [given, largest]
            raise


def _computes_as(program: torch.export.ExportedProgram, model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a program has the results of a model."""
    with preserved_state(model), torch.no_grad():
        return same_numbers(with_states_copied(program)(*args, **kwargs), model(*args, **kwargs))


def _partitioners(by_codes: bool, **options: Any) -> list[Any]:
    """XNNPACK's partitioner, and one for layers whose weight is computed, which the first does not take."""
    xnnpack = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch", "Export to ExecuTorch")
    partitioners = [xnnpack.XnnpackPartitioner(**options)]
    if by_codes:
        package = "executorch.backends.xnnpack.partition.config"
        gemm, precisions = (importlib.import_module(f"{package}.{name}") for name in ("gemm_configs", "xnnpack_config"))
        partitioners.append(
            xnnpack.XnnpackPartitioner(
                configs=[gemm.LinearConfig, gemm.AddmmConfig, gemm.MMConfig],
                config_precisions=precisions.ConfigPrecisionType.FP32,
                force_non_static_weights_for_f32_linear=True,
                **options,
            )
        )
    return partitioners


def _lowered(program: torch.export.ExportedProgram, partitioners: list[Any]) -> bytes:
    exir = importlib.import_module("executorch.exir")
    with less_repetition():
        edge = exir.to_edge_transform_and_lower(program, partitioner=partitioners)
        _keep_states(edge.exported_program())
        # Views of the inputs of a branch are left without memory: those of programs with branches become copies.
        branches = any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in program.graph.nodes)
        content: bytes = edge.to_executorch(exir.ExecutorchBackendConfig(remove_view_copy=not branches)).buffer
    return content


def _keep_states(program: torch.export.ExportedProgram) -> None:
    """Have the values of buffers that a program writes to stored in its file, of which ExecuTorch keeps the shapes."""
    buffers, written = program.graph_signature.inputs_to_buffers, program.graph_signature.buffers_to_mutate.values()
    for node in program.graph.find_nodes(op="placeholder"):
        if buffers.get(node.name) in written:
            node.meta["et_init_buffer"] = True
