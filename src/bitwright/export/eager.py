"""Finalize a prepared eager model: check and build everything, then swap it into the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bitwright._utils.kept_layouts import keep_layout, mark_activation, mark_finalized
from bitwright._utils.mapped_folder import mapped_folder
from bitwright._utils.parametrization import clear_parametrization
from bitwright.artifact import CompressedTensor, DenseTensor, QuantizedActivation, compress_tensor
from bitwright.artifact.packed import replace_weight
from bitwright.artifact.sites import WeightSite, activation_simulators, weight_sites
from bitwright.base_model_compressor import _BaseModelCompressor
from bitwright.common import ExportBackend
from bitwright.quantization._export_utils import (
    get_activation_export_handler,
    refuse_stateless,
    validate_activation_export_supported,
)
from bitwright.quantization.config import ExecutionMode
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .coreai_activations import coreai_activation
from .coreai_weights import coreai_layers, coreai_weight, unsupported_weight
from .dense import fold_eager
from .mapped import MappedFiles

__all__ = ["finalize_eager", "place_weight", "replace_modules"]


def finalize_eager(model: nn.Module, backend: ExportBackend | str, mmap_dir: str | None = None) -> nn.Module:
    """Turn a prepared eager model into what ``backend`` converts.

    Args:
        model: a prepared model. Changed in place, and only after everything was checked and built.
        backend: Core AI, Core ML, ``Torch``, or ``_TORCH``, which leaves the model as it is.
        mmap_dir: Core AI only: folder for file-backed weights.

    Returns:
        ``model``. It no longer counts as prepared, except for ``_TORCH``.

    Raises:
        MissingExtraError: the backend's library is not installed.
        ValueError: unknown backend, a weight or activation that the backend cannot hold (``CoreMLExportError`` for Core
            ML), or ``mmap_dir`` with another backend or device. The model is unchanged.
        NotImplementedError: activations whose parameters are computed at run time.
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes; names it.
    """
    backend = ExportBackend(backend)
    folder = mapped_folder(mmap_dir, backend)
    if backend == ExportBackend._TORCH:
        return model
    if backend == ExportBackend.Torch:
        fold_eager(model)
        _BaseModelCompressor._unmark_model(model)
        return model
    refuse_stateless(activation_simulators(model).items(), backend, ExecutionMode.EAGER)
    if backend == ExportBackend.CoreAI:
        _finalize_coreai(model, folder)
    else:
        from .coreml import finalize_eager_coreml

        finalize_eager_coreml(model)
    _BaseModelCompressor._unmark_model(model)
    mark_finalized(model, backend.value)
    return model


@dataclass
class Replacements:
    """What goes where, collected before anything is changed."""

    weights: list[tuple[WeightSite, CompressedTensor[Any], nn.Module | None]] = field(default_factory=list)
    activations: dict[FakeQuantizeImplBase, nn.Module] = field(default_factory=dict)


def _finalize_coreai(model: nn.Module, mmap_dir: str | None) -> None:
    coreai_layers()
    activations = activation_simulators(model)
    for path, simulator in activations.items():
        handler = get_activation_export_handler(simulator.granularity, ExecutionMode.EAGER)
        if handler is None:
            validate_activation_export_supported(simulator)
            QuantizedActivation.from_simulator(simulator, path)
    files = None if mmap_dir is None else MappedFiles(mmap_dir, model)
    replacements = Replacements()
    try:
        for site in weight_sites(model):
            tensor = compress_tensor(site.tensor, site.simulators, site.name)
            replacements.weights.append((site, tensor, _weight_module(site, tensor, files)))
        for simulator in dict.fromkeys(activations.values()):
            replacements.activations[simulator] = _activation_module(simulator)
    except BaseException:
        if files is not None:
            files.discard()
        raise
    for site, tensor, module in replacements.weights:
        for path, attribute in site.owners:
            place_weight(model.get_submodule(path), attribute, tensor, module)
    replace_modules(model, replacements.activations)


def _weight_module(site: WeightSite, tensor: CompressedTensor[Any], files: MappedFiles | None) -> nn.Module | None:
    """The parametrization that computes a weight; None for a weight that was left dense."""
    problem = unsupported_weight(tensor)
    if problem is not None:
        raise ValueError(f"Weight {site.name!r} cannot be exported to Core AI: {problem}.")
    if isinstance(tensor, DenseTensor) and not tensor.is_sparse:
        return None
    module = coreai_weight(tensor)
    if files is not None:
        files.store(module, site.name)
    return module


def _activation_module(simulator: FakeQuantizeImplBase) -> nn.Module:
    if simulator.is_disabled():
        return nn.Identity()
    handler: Callable[..., Any] | None = get_activation_export_handler(simulator.granularity, ExecutionMode.EAGER)
    if handler is None:
        return coreai_activation(simulator)
    module: nn.Module = handler(simulator)
    return module


def place_weight(owner: nn.Module, attribute: str, tensor: CompressedTensor[Any], module: nn.Module | None) -> None:
    """Put a weight in its final form: under ``module``, or as the plain dense tensor."""
    keep_layout(owner, attribute, tensor.layout)
    if module is not None:
        replace_weight(owner, attribute, module, tensor.dtype)
        return
    clear_parametrization(owner, attribute)
    getattr(owner, attribute).data = tensor.decode()


def replace_modules(model: nn.Module, replacements: dict[Any, nn.Module]) -> None:
    """Replace child modules wherever they are registered."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in replacements:
                module._modules[name] = mark_activation(replacements[child])
