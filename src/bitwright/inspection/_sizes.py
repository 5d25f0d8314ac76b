"""Elements and packed bits of every tensor of a model, whatever was done to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from bitwright._utils.kept_layouts import finalized_for, kept_layouts, stands_for_activation
from bitwright._utils.parametrization import own_parametrizations
from bitwright.artifact import ArtifactError, DenseTensor, PackedTensor, compress_tensor
from bitwright.artifact.from_graph import folded
from bitwright.artifact.graph_sites import GraphSimulators, state_of
from bitwright.artifact.sites import weight_sites
from bitwright.base_model_compressor import _COREAI_OPT_PREPARED_ATTR
from bitwright.config.spec import CompressionSimulatorBase

__all__ = ["StoredSize", "is_compressed", "stored_sizes"]

_COREML = "_COREML_/"
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS: Mapping[torch.layout, tuple[str, ...]] = MappingProxyType(
    {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: _ROWS,
        torch.sparse_bsr: _ROWS,
        torch.sparse_csc: _COLUMNS,
        torch.sparse_bsc: _COLUMNS,
    }
)
_GRAPH_SUFFIXES = ("_quantized", "_scale", "_zero_point", "_minval")


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Size of one tensor.

    Attributes:
        name: dotted name in the float model.
        elements: number of elements.
        bits: bits that it takes in packed form, without padding to whole bytes.
        nbytes: bytes that it takes in packed form.
        compressed: whether it is stored otherwise than as it was.
    """

    name: str
    elements: int
    bits: int
    nbytes: int
    compressed: bool

    @property
    def module(self) -> str:
        """Path of the module that it belongs to."""
        return self.name.rpartition(".")[0]


def is_compressed(model: nn.Module) -> bool:
    """Return whether a model holds simulators, packed weights, or what finalizing leaves of them."""
    kinds = (CompressionSimulatorBase, PackedTensor)
    return any(isinstance(module, kinds) for module in model.modules()) or any(True for _ in kept_layouts(model))


def stored_sizes(model: nn.Module, strict: bool = True, *, carried: bool = False) -> list[StoredSize]:
    """Return the sizes of all parameters and persistent buffers of a model; what is shared counts once.

    The model may be plain, prepared by any compressor, loaded from an artifact, or finalized for any backend.

    Args:
        model: the model.
        strict: raise for a weight that cannot be packed; else it counts as it is.
        carried: buffers that are not persistent too, which a model carries but no file of its state holds.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes.
    """
    model = folded(model)
    found: dict[str, StoredSize] = {}
    hidden = _activation_parameters(model)
    for name, layout in _layouts(model, strict):
        found[name] = StoredSize(name, layout.numel, layout.nbits, layout.nbytes, True)
    for path, attribute, _ in kept_layouts(model):
        hidden |= _replaced_names(model, path, attribute)
    seen = {id(tensor) for name, tensor in _plain_state(model, carried) if name in found}
    for name, tensor in _plain_state(model, carried):
        if name not in hidden and name not in found and id(tensor) not in seen:
            seen.add(id(tensor))
            nbytes = _bytes_of(tensor)
            found[name] = StoredSize(name, tensor.numel(), 8 * nbytes, nbytes, False)
    return list(found.values())


def _layouts(model: nn.Module, strict: bool) -> Iterator[tuple[str, Any]]:
    """Yield the layout of every compressed weight by its first name."""
    if isinstance(model, fx.GraphModule):
        done: set[str] = set()
        for weight in GraphSimulators.of(model).weights:
            if weight.target not in done:
                done.add(weight.target)
                state = state_of(model, weight.target)
                yield weight.target, _layout(state, weight.simulators, weight.target, strict)
    for site in weight_sites(model, strict):
        if site.is_packed:  # below
            continue
        yield site.name, _layout(site.tensor, site.simulators, site.name, strict)
    shared: set[int] = set()
    for path, module in model.named_modules():
        for attribute, stack in own_parametrizations(module).items():
            for entry in stack:
                if isinstance(entry, PackedTensor) and id(entry) not in shared:
                    shared.add(id(entry))
                    yield _join(path, attribute), entry.layout
    for path, attribute, layout in kept_layouts(model):
        if id(layout) not in shared:
            shared.add(id(layout))
            yield _join(path, attribute), layout


def _layout(tensor: torch.Tensor, simulators: Sequence[nn.Module], name: str, strict: bool) -> Any:
    try:
        return compress_tensor(tensor, simulators, name).layout
    except ArtifactError:
        if strict:
            raise
        return DenseTensor.from_tensor(tensor).layout


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's numbers; of a sparse one, those of its values and indices."""
    parts = _SPARSE_PARTS.get(tensor.layout)
    if parts is None:
        return tensor.nbytes
    return sum(int(getattr(tensor.detach(), part)().nbytes) for part in parts)


def _plain_state(model: nn.Module, carried: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, ``carried`` or persistent, of the float model that are not compressed."""
    for path, module in _float_modules(model, ""):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _join(path, name), parameter
        for name, buffer in module._buffers.items():
            ours = name == _COREAI_OPT_PREPARED_ATTR or name.startswith(_COREML)
            if buffer is not None and not ours and (carried or name not in module._non_persistent_buffers_set):
                yield _join(path, name), buffer


def _float_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is None or isinstance(child, CompressionSimulatorBase) or _is_activation(name, child):
            continue
        if isinstance(child, PackedTensor):  # in a graph, where the layout is kept beside it
            continue
        if isinstance(child, parametrize.ParametrizationList) and _is_compressed(child):
            continue
        yield from _float_modules(child, _join(path, name))


def _is_activation(name: str, module: nn.Module) -> bool:
    return stands_for_activation(module) or name.startswith("_mil_act_quant_")


def _is_compressed(stack: parametrize.ParametrizationList) -> bool:
    original = getattr(stack, "original", None)
    emptied = original is not None and original.numel() == 0
    return emptied or any(isinstance(entry, CompressionSimulatorBase) for entry in stack)


def _replaced_names(model: nn.Module, path: str, attribute: str) -> set[str]:
    """Names of what stands for a finalized weight."""
    names = {_join(path, attribute)}
    if isinstance(model, fx.GraphModule):
        base = attribute.replace(".", "_")
        names |= {base + suffix for suffix in _GRAPH_SUFFIXES}
    return names


def _activation_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of activations that finalizing a graph left at its root."""
    if not isinstance(model, fx.GraphModule) or finalized_for(model) is None:
        return set()
    return {name for name in model._buffers if name.startswith("activation_post_process_")}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
