"""Core ML: an ``.mlpackage`` made by coremltools, and what its weights decode to."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bitwright._utils.files import new_file_atomically, refuse_full
from bitwright.common import CoreMLExportError, ExportBackend
from bitwright.program.graph import plain_attention
from bitwright.program.protect import preserved_state

from .conversion import (
    OTHER_OPERATOR,
    ConversionError,
    captured,
    converting,
    finalized_copy,
    module_path,
    refuse_missing,
)
from .coreml import Dequantize
from .coreml_ops import register_missing_ops
from .coreml_weights import NO_BFLOAT16
from .devices import all_on_cpu
from .extras import require
from .signatures import warn_of_lost_states, written_states

__all__ = ["check_coreml_operators", "compressed_constants", "export_coreml"]


def export_coreml(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | Path,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: Literal["float16", "float32"] = "float16",
) -> Path:
    """Write a prepared model as a Core ML package for iOS 18, macOS 15 and later.

    Weights become ``constexpr_*`` ops on packed constants, activations ``quantize`` and ``dequantize``. Core ML runs on
    Apple's systems only; :func:`compressed_constants` reads back anywhere what the weights decode to.

    Args:
        model: prepared in eager or graph mode; not changed.
        example_inputs: positional inputs. Shapes of tensors are fixed in the package; all else stays as it is here.
        path: the ``.mlpackage`` folder to write; it must be empty or not exist.
        example_kwargs: keyword inputs. Tensors among them become inputs of the package, after the positional ones.
        precision: in which the program computes; ``"float16"`` is coremltools' own choice. Scales and look-up tables
            are stored in it. Inputs in half precision stay so.

    Returns:
        ``path``.

    Raises:
        MissingExtraError: the coreml extra is not installed.
        FileExistsError: ``path`` is not empty.
        CoreMLExportError: Core ML cannot hold a weight or an activation; it has no bfloat16.
        NotImplementedError: activations whose parameters are computed at run time.
        ConversionError: torch cannot trace the model, or coremltools cannot take it.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        OSError: the folder cannot be written.
    """
    if precision not in ("float16", "float32"):
        raise ValueError(f"precision must be 'float16' or 'float32', got {precision!r}.")
    coremltools = require("coremltools", "coreml", "Export to Core ML")
    model, example_inputs, kwargs = all_on_cpu(model, example_inputs, example_kwargs)
    tensors = (*model.parameters(), *model.buffers(), *tree_leaves((example_inputs, kwargs)))
    if any(isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise CoreMLExportError(f"{NO_BFLOAT16}.")
    finalized = _Flat(_in_float32(finalized_copy(model, ExportBackend.CoreML)), example_inputs, kwargs)
    inputs = finalized.inputs()
    target = Path(path)
    refuse_full(target)
    traced = _traced(finalized, inputs)
    refuse_missing("coremltools", _missing(coremltools, traced, inputs))
    with converting("coremltools"):
        half = precision == "float16"
        package = coremltools.convert(
            traced,
            inputs=[_input_type(coremltools, tensor) for tensor in inputs],
            convert_to="mlprogram",
            minimum_deployment_target=coremltools.target.iOS18,
            compute_precision=coremltools.precision.FLOAT16 if half else coremltools.precision.FLOAT32,
            skip_model_load=True,
        )
    with new_file_atomically(target) as part, converting("coremltools"):
        package.save(part)
    return target


def compressed_constants(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the compressed constants of a package decode to, by name, as coremltools decodes them.

    Args:
        path: the ``.mlpackage`` folder.

    Raises:
        MissingExtraError: the coreml extra is not installed.
    """
    coremltools = require("coremltools", "coreml", "Reading Core ML packages")
    loader = require("coremltools.converters.mil.frontend.milproto.load", "coreml", "Reading Core ML packages")
    package = coremltools.models.MLModel(str(path), skip_model_load=True)
    program = loader.load(
        package.get_spec(), specification_version=package.get_spec().specificationVersion,
        file_weights_dir=package.weights_dir,
    )  # fmt: skip
    for operation in program.functions["main"].operations:
        inner = {user.op_type for output in operation.outputs for user in output.child_ops}
        if operation.op_type.startswith("constexpr_") and not any(kind.startswith("constexpr_") for kind in inner):
            for output, value in zip(operation.outputs, _decoded(operation), strict=True):
                yield output.name, torch.from_numpy(value.copy())


def check_coreml_operators(
    model: nn.Module, example_inputs: tuple[Any, ...], example_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Check that coremltools translates the operators of a float model.

    Args:
        model: in eval mode, not in bfloat16; not changed.
        example_inputs: positional inputs.
        example_kwargs: keyword inputs.

    Raises:
        MissingExtraError: the coreml extra is not installed.
        ConversionError: torch cannot trace the model, or coremltools cannot take it; with a problem for each operator.
    """
    inner = _in_float32(copy.deepcopy(model)) if _has_halves(model) else model
    flat = _Flat(inner, example_inputs, dict(example_kwargs or {}))
    inputs = flat.inputs()
    traced = _traced(flat, inputs)
    coremltools = require("coremltools", "coreml", "Export to Core ML")
    refuse_missing("coremltools", _missing(coremltools, traced, inputs))
    with converting("coremltools", OTHER_OPERATOR):
        _frontend(coremltools, traced, inputs).convert()


def _traced(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    with converting("torch.jit.trace"), plain_attention(), preserved_state(model):
        before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        traced: Any = torch.jit.trace(model, _wide(inputs), check_trace=False)  # type: ignore[no-untyped-call]
        after = dict(model.named_buffers())
        written = [name for name, (buffer, version) in before.items()
                   if after.get(name) is not buffer or buffer._version != version]  # fmt: skip
    states = [name.removeprefix("inner.") for name in _reaching_outputs(written, model, inputs)]
    warn_of_lost_states(states, "a Core ML package")
    _replace_copies(traced)
    register_missing_ops()
    return traced


def _reaching_outputs(written: list[str], model: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """Which of the written buffers later calls are computed from; all of them where torch.export cannot tell."""
    if not written:
        return []
    try:
        reaching = written_states(captured(model, _wide(inputs)))
    except ConversionError:
        return written
    return [name for name in written if name in reaching]


def _frontend(coremltools: Any, traced: Any, inputs: tuple[Any, ...]) -> Any:
    """What coremltools translates a trace with."""
    module = require("coremltools.converters.mil.frontend.torch.converter", "coreml", "Export to Core ML")
    types = [_input_type(coremltools, tensor) for tensor in inputs]
    return module.TorchConverter(traced, types, opset_version=coremltools.target.iOS18)


def _missing(coremltools: Any, traced: Any, inputs: tuple[Any, ...]) -> dict[str, list[str]]:
    """Module paths by operator, of those that coremltools' registry lacks."""
    registry = require("coremltools.converters.mil.frontend.torch.ops", "coreml", "Export to Core ML")
    with converting("coremltools"):
        nodes = _frontend(coremltools, traced, inputs).graph.nodes
    missing = [node for node in nodes if registry._TORCH_OPS_REGISTRY.get_func(node.kind) is None]
    paths = _module_paths(traced) if missing else {}
    found: dict[str, list[str]] = {}
    for node in missing:
        found.setdefault(node.kind, []).extend(paths.get((node.kind, node.model_hierarchy)) or [module_path(node)])
    return found


def _module_paths(traced: Any) -> dict[tuple[str, str], list[str]]:
    """Whole paths by operator and the names that coremltools keeps, which lack those of lists of modules."""
    paths: dict[tuple[str, str], list[str]] = {}
    for node in traced.inlined_graph.nodes():
        path = node.scopeName().rpartition("/")[2].removeprefix("__module.inner").removeprefix(".")
        kind = node.kind().rpartition("::")[2].lower()
        paths.setdefault((kind, node.getModuleHierarchy()), []).append(path)
    return paths


class _Flat(nn.Module):
    """A model that takes tensors by position, and returns a tuple: traces hold no objects of other classes.

    Args:
        inner: the model.
        args: its positional inputs. Tensors, in containers too, are given by position here; all else stays.
        kwargs: its keyword inputs, likewise, after the others.
    """

    def __init__(self, inner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner = inner
        self._leaves, self._structure = tree_flatten((args, dict(kwargs)))

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors among the inputs."""
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the only result, or a tuple of all of them."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        leaves = [leaf for leaf in tree_leaves(self.inner(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _has_halves(model: nn.Module) -> bool:
    return any(tensor.dtype == torch.float16 for tensor in (*model.parameters(), *model.buffers()))


def _in_float32(model: nn.Module) -> nn.Module:
    """A model in half precision as one in float32, in place: coremltools takes constants of one precision only, and
    chooses that of the program itself. Weights are the same numbers."""
    if not _has_halves(model):
        return model
    for module in model.modules():
        if isinstance(module, Dequantize):
            module.dtype = torch.float32
        if isinstance(module, fx.GraphModule):
            _replace_float16(module)
    _unshare_parameters(model)
    return model.float()


def _unshare_parameters(model: nn.Module) -> None:
    """Give a model parameters of its own, tied ones again as one: those of a graph are the user's, and casts change
    parameters themselves."""
    own: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in own:
                    own[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                module._parameters[name] = own[parameter]


def _wide(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float16 else x for x in inputs)


def _replace_float16(model: fx.GraphModule) -> None:
    """Let a graph's own casts and new tensors be float32."""

    def wide(argument: Any) -> Any:
        return torch.float32 if argument is torch.float16 else argument

    for node in model.graph.nodes:
        node.args, node.kwargs = tree_map(wide, node.args), tree_map(wide, node.kwargs)
    model.recompile()


def _replace_copies(traced: Any) -> None:
    """Let whole tensors that the model copies something into, as ``x.copy_(y)`` does, be what was copied.

    coremltools has copies into selections and slices only. Whoever reads the tensor afterwards reads what ``copy_``
    returned: so it is recorded.
    """
    called = [module for module in traced.modules() if module._c._has_method("forward")]
    for module in called:
        for node in list(module.graph.nodes()):
            if node.kind() != "aten::copy_":
                continue
            target, value, _ = node.inputs()
            if target.node().kind() not in ("aten::select", "aten::slice", "aten::empty"):
                node.output().replaceAllUsesWith(value)
                node.destroy()


def _decoded(operation: Any) -> tuple[Any, ...]:
    """The outputs of a ``constexpr_*`` op; its operands may be such ops themselves."""
    operands = []
    for name in inspect.signature(type(operation).decompress).parameters:
        variable = getattr(operation, name)
        value = None if variable is None else variable.val
        if variable is not None and value is None:
            value = _decoded(variable.op)[list(variable.op.outputs).index(variable)]
        operands.append(value)
    values = type(operation).decompress(*operands)
    return values if isinstance(values, tuple) else (values,)


def _input_type(coremltools: Any, tensor: torch.Tensor) -> Any:
    import numpy as np

    kinds: dict[torch.dtype, Any] = {torch.int64: np.int32, torch.int32: np.int32, torch.float16: np.float16}
    return coremltools.TensorType(shape=tuple(tensor.shape), dtype=kinds.get(tensor.dtype, np.float32))
