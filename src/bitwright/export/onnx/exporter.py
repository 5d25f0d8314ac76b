"""Write a prepared model as an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from bitwright._utils.files import new_file_atomically
from bitwright.artifact import QuantizedTensor
from bitwright.export.arithmetic import arithmetic_activation
from bitwright.export.conversion import converting
from bitwright.export.devices import all_on_cpu
from bitwright.export.extras import require
from bitwright.export.lowering import LoweredModel, lower
from bitwright.export.signatures import warn_of_lost_states, written_states
from bitwright.program.export_errors import not_a_tuple
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .activations import activation_opset, build_activation, has_nodes
from .averages import average_in_order
from .builder import NodeBuilder, drop_unread_initializers, replace_value
from .fusion import keep_all_apart, keep_misfits_apart, keep_moved_batches_apart
from .half import compute_in_float32, round_outputs
from .names import check_names, distinct_output_names, give_names
from .narrow_integers import widen_integers
from .nbits import use_matmul_nbits
from .products import use_exact_products
from .requantization import join_quantizers, move_pools, use_tables
from .stand_ins import ACTIVATION, DOMAIN, WEIGHT, ActivationStandIn, WeightStandIn, meaning
from .tracing import MIN_OPSET, traced
from .unsigned import use_fitting_weights
from .weights import build_weight, permuted, weight_opset

__all__ = ["export_onnx"]


def export_onnx(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    int4: Literal["qdq", "matmul_nbits"] = "qdq",
    unsigned_activations: bool = True,
    integer_kernels: bool | Literal["exact", "fused"] = True,
    bfloat16_kernels: bool = False,
    float16_kernels: bool | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
) -> Path:
    """Write a prepared model as an ONNX file that computes what the model computes.

    Quantized weights become ``DequantizeLinear`` on packed initializers, activations ``QuantizeLinear`` and
    ``DequantizeLinear``, palettes ``Gather``. Activations that these cannot hold (dynamic, per channel, per block, per
    token, FP4) are written as the arithmetic of their simulation.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs.
        path: the file to write; weights beyond 1.5 GB go to ``<name>.data`` beside it.
        example_kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``.
        opset: version of the operator set; None for the smallest that holds the model, at least 18.
        int4: ``"qdq"``, or ``"matmul_nbits"`` for ONNX Runtime's own operator on linear layers with 4-bit weights in
            blocks of 16, 32, 64, 128 or 256 along the inputs.
        unsigned_activations: write int8 activations, and the weights that integer kernels multiply with them, as uint8
            with a zero point that is 128 higher, or as two signed halves, which is quicker. Values are the same, and
            sums in ONNX Runtime's kernels for x86 do not overflow. False keeps them signed, as TensorRT wants them; on
            processors without VNNI ONNX Runtime is then right with ``open_session(..., precise=True)`` only.
        integer_kernels: let ONNX Runtime multiply codes in layers between quantized activations. ``"fused"`` keeps
            layers and weights whole, as every reader of such files fuses them; that rounds biases, which puts about
            one code in some thousands of a layer's output beside that of the prepared model. ``"exact"`` writes
            products whose biases are added in floating point, convolutions as products over patches, and layers that
            this would slow down in floating point. True chooses the exact form for layers where it is as quick, and
            for the others where they are a small part of the work; the fused one elsewhere and with signed
            activations. False keeps every operator in floating point, as slow as the float model.
        bfloat16_kernels: leave operators on bfloat16 values to the runtime's own kernels. False lets them compute in
            float32 between casts, as PyTorch does, for ONNX Runtime has no such kernels on the CPU.
        float16_kernels: the same for float16, which ONNX Runtime takes on the CPU, but rounds at other places than
            PyTorch. None for True unless activations are quantized, whose codes this moves; indexed writes that add or
            multiply, which it cannot run, are then in float32.
        input_names: names of the graph's inputs.
        output_names: names of the graph's outputs.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: the onnx extra is not installed.
        ValueError: ``opset`` is too small for the model, or torch.onnx cannot write it; ``int4`` or ``integer_kernels``
            is unknown; inputs and outputs share a name; or an activation has no ONNX form.
        ConversionError: torch's exporter cannot take the model.
        TypeError: ``example_inputs`` is no tuple, or ``opset`` no integer.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        OSError: the file cannot be written; an old one stays.
    """
    _check_arguments(example_inputs, int4, integer_kernels, [*(input_names or ()), *(output_names or ())])
    model, example_inputs, example_kwargs = all_on_cpu(model, example_inputs, example_kwargs)
    lowered = lower(model, WeightStandIn, _activation_stand_in)
    version = _opset(lowered, opset)
    program = traced(
        lowered.model, example_inputs, example_kwargs, dynamic_shapes, opset=version,
        input_names=input_names, output_names=output_names, meaning=partial(meaning, lowered=lowered),
    )  # fmt: skip
    _check_written_opset(program.model, version)
    names = distinct_output_names(program.model.graph)
    _tell_of_states(program)
    round_outputs(program)
    _fill_in(program, lowered, int4, unsigned_activations)
    _choose_kernels(program.model.graph, integer_kernels, unsigned_activations)
    _choose_precision(program.model, lowered, bfloat16_kernels, float16_kernels)
    keep_moved_batches_apart(program.model.graph)
    _finish(program.model, names, int4)
    return _save(program, Path(path))


def _finish(model: Any, output_names: Sequence[str], int4: str) -> None:
    """Leave in the model what its readers need, under the names that were asked for."""
    _drop_metadata(model)
    give_names(model, output_names)
    _declare_domains(model, int4)


def _tell_of_states(program: Any) -> None:
    if program.exported_program is not None:
        warn_of_lost_states(written_states(program.exported_program), "an ONNX file")


def _declare_domains(model: Any, int4: str) -> None:
    model.opset_imports.pop(DOMAIN, None)
    if int4 == "matmul_nbits":
        model.opset_imports["com.microsoft"] = 1


def _check_arguments(example_inputs: Any, int4: Any, integer_kernels: Any, names: Sequence[str]) -> None:
    if int4 not in ("qdq", "matmul_nbits"):
        raise ValueError(f"int4 must be 'qdq' or 'matmul_nbits', got {int4!r}.")
    if integer_kernels not in (True, False, "exact", "fused"):
        raise ValueError(f"integer_kernels must be True, False, 'exact' or 'fused', got {integer_kernels!r}.")
    if not isinstance(example_inputs, tuple):
        raise not_a_tuple(example_inputs)
    check_names(names)
    for module in ("onnx", "onnxscript", "onnx_ir"):
        require(module, "onnx", "Export to ONNX")


def _activation_stand_in(name: str, simulator: FakeQuantizeImplBase) -> nn.Module | None:
    if has_nodes(simulator):
        return ActivationStandIn(name)
    return arithmetic_activation(name, simulator, "ONNX")


def _opset(lowered: LoweredModel, opset: int | None) -> int:
    """Return the version of the operator set that was asked for, or the smallest that holds the model."""
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int)):
        raise TypeError(f"opset must be an integer or None, got {opset!r}.")
    weights = [weight_opset(tensor) for tensor in lowered.weights.values()]
    activations = [activation_opset(simulator) for simulator in lowered.activations.values()]
    needed = max([MIN_OPSET, *weights, *activations])
    if opset is not None and opset < needed:
        raise ValueError(f"This model needs ONNX opset {needed}, got opset={opset!r}.")
    return needed if opset is None else opset


def _check_written_opset(model: Any, asked: int) -> None:
    """Refuse a model that torch.onnx has left in another version of the operator set, as it does without an error."""
    written = model.opset_imports[""]
    if written != asked:
        raise ValueError(
            f"torch.onnx wrote this model in ONNX opset {written}, for it cannot convert it to opset {asked}. Choose a "
            "version that the installed onnx has, or let opset=None choose."
        )


def _choose_kernels(graph: Any, integer_kernels: bool | str, unsigned: bool) -> None:
    """Let ONNX Runtime see the operators that it shall run on codes, and no others."""
    if not integer_kernels:
        move_pools(graph, integer_kernels=False)
        join_quantizers(graph)
        keep_all_apart(graph)
        return
    if integer_kernels == "exact":
        use_exact_products(graph, "all")
    else:
        use_exact_products(graph, "quick" if integer_kernels is True and unsigned else "overflowing")
    move_pools(graph, integer_kernels=True)
    join_quantizers(graph)
    keep_misfits_apart(graph)
    use_tables(graph)
    use_fitting_weights(graph, halved=integer_kernels != "fused")


def _choose_precision(model: Any, lowered: LoweredModel, bfloat16_kernels: bool, float16_kernels: bool | None) -> None:
    """Let operators on half precision that shall not run in it, or cannot, compute in float32, and so for integers."""
    widen_integers(model)
    if not bfloat16_kernels:
        compute_in_float32(model, "bfloat16")
    if float16_kernels is False or (float16_kernels is None and lowered.activations):
        compute_in_float32(model, "float16")
    elif float16_kernels is None:
        compute_in_float32(model, "float16", accumulating_writes_only=True)


def _fill_in(program: Any, lowered: LoweredModel, int4: str, unsigned: bool) -> None:
    """Replace every stand-in node by the nodes of what it stands for; averages of the codes add in PyTorch's order."""
    graph = program.model.graph
    built: dict[tuple[str, ...], Any] = {}
    for number, node in enumerate(list(graph)):
        if node.domain != DOMAIN:
            continue
        name = node.attributes["name"].value
        output = node.outputs[0]
        if node.op_type == ACTIVATION:
            build = NodeBuilder(graph, node, name, number)
            replace_value(output, build_activation(build, node.inputs[0], lowered.activations[name], unsigned))
        elif node.op_type == WEIGHT:
            _fill_in_weight(graph, node, lowered.weights[name], int4, built)
        before = node.inputs[0].producer() if node.op_type == ACTIVATION else None
        graph.remove(node, safe=True)
        if before is not None and not any(value.uses() or value in graph.outputs for value in before.outputs):
            graph.remove(before, safe=True)  # a ReLU that is now done on the codes
    drop_unread_initializers(graph)
    average_in_order(program)


def _fill_in_weight(graph: Any, node: Any, tensor: Any, int4: str, built: dict[tuple[str, ...], Any]) -> None:
    """Replace one use of a weight; ``built`` remembers what computes a weight, for its further uses."""
    name, output = node.attributes["name"].value, node.outputs[0]
    if int4 == "matmul_nbits":
        use_matmul_nbits(graph, node, name, tensor)
    transposes = [use.node for use in output.uses()]
    if (
        transposes
        and output not in graph.outputs
        and isinstance(tensor, QuantizedTensor)
        and not (tensor.is_sparse and tensor.minval() is not None)
        and all(user.op_type == "Transpose" and user.domain == "" for user in transposes)
    ):
        for user in transposes:
            order = tuple(user.attributes["perm"].value)
            key = (name, *map(str, order))
            if key not in built:
                build = NodeBuilder(graph, node, "_".join([name, "order", *key[1:]]), "w")
                built[key] = build_weight(build, permuted(tensor, order))
            replace_value(user.outputs[0], built[key])
            graph.remove(user, safe=True)
    elif output.uses() or output in graph.outputs:
        if (name,) not in built:
            built[(name,)] = build_weight(NodeBuilder(graph, node, name, "w"), tensor)
        replace_value(output, built[(name,)])


def _drop_metadata(model: Any) -> None:
    """Drop the traces of Python code that the exporter attaches to everything: more bytes than many a model."""
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _save(program: Any, path: Path) -> Path:
    with new_file_atomically(path) as part, converting("torch.onnx.export"):
        program.save(part)
    return path
