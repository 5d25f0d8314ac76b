"""Where compression stands in a prepared model: its weights with their simulators, and its activation simulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bitwright._utils.packed_weights import PackedWeight, is_packed
from bitwright._utils.parametrization import own_parametrizations
from bitwright._utils.sharded import is_sharded
from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .errors import ArtifactError
from .layouts import dtype_name

__all__ = [
    "WeightSite",
    "activation_simulators",
    "dense_state",
    "further_names",
    "own_state",
    "refuse_meta",
    "simulators_in",
    "weight_sites",
]

_KINDS = CompressionSimulatorBase, PackedWeight


@dataclass(eq=False, slots=True)
class WeightSite:
    """One weight under simulators, and every place that it is registered at.

    Attributes:
        owners: ``(module path, attribute)`` of every place, the first one names the weight. A module that stands at
            several paths is one place, under the first of them.
        tensor: the dense tensor as it enters the first simulator; an empty one if the weight is packed.
        simulators: in the order in which they are applied; what holds the codes of a packed weight is one.
    """

    owners: list[tuple[str, str]]
    tensor: torch.Tensor
    simulators: tuple[nn.Module, ...] = field(default=())

    @property
    def name(self) -> str:
        """Dotted name of the weight."""
        return self.names[0]

    @property
    def is_packed(self) -> bool:
        """Whether nothing is held but codes."""
        return is_packed(self.simulators)

    @property
    def names(self) -> list[str]:
        """Dotted name of every place."""
        return [f"{path}.{attribute}" if path else attribute for path, attribute in self.owners]


def weight_sites(model: nn.Module, strict: bool = True) -> list[WeightSite]:
    """Return the weights of an eager model that stand under simulators or are packed, in the order of its modules.

    A weight that several modules share, with the same simulators, is one site.

    Args:
        model: the model.
        strict: raise for a weight that is changed further after compression; else leave it out.

    Raises:
        ArtifactError: a parametrization of another kind comes after a simulator.
    """
    sites: dict[tuple[int, ...], WeightSite] = {}
    for path, module in model.named_modules():
        for attribute, stack in own_parametrizations(module).items():
            try:
                simulators = _simulators_of(stack, f"{path}.{attribute}")
            except ArtifactError:
                if strict:
                    raise
                continue
            if not simulators:
                continue
            # Under shared codes each module has an empty tensor of its own.
            shared = () if is_packed(simulators) else (id(_first_original(stack)),)
            key = (*shared, *map(id, simulators))
            if key in sites:
                sites[key].owners.append((path, attribute))
            else:
                sites[key] = WeightSite([(path, attribute)], _entering(stack, len(simulators)), simulators)
    return list(sites.values())


def further_names(model: nn.Module, sites: Iterable[WeightSite]) -> dict[str, str]:
    """Return every name of the weights at ``sites`` but the first one, to the first one.

    A module that stands at several paths gives its weight a name at each.
    """
    first = {(id(model.get_submodule(path)), attribute): site.name for site in sites for path, attribute in site.owners}
    attributes: dict[int, list[str]] = {}
    for module, attribute in first:
        attributes.setdefault(module, []).append(attribute)
    names: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute in attributes.get(id(module), ()):
            names[f"{path}.{attribute}" if path else attribute] = first[id(module), attribute]
    return {name: to for name, to in names.items() if name != to}


def simulators_in(model: nn.Module) -> list[nn.Module]:
    """Return every simulator of a model once."""
    return [module for module in model.modules() if isinstance(module, CompressionSimulatorBase)]


def activation_simulators(model: nn.Module) -> dict[str, FakeQuantizeImplBase]:
    """Return the simulators of activations by module path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, FakeQuantizeImplBase) and module.quantization_target == CompressionTargetTensor.ACTIVATION
    }


def dense_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers that stand under no simulator, by name, aliases included.

    Raises:
        ArtifactError: one is on the meta device, lazy, sparse, or of a dtype that cannot be stored.
    """
    for path, module in _plain_modules(model, ""):
        for name, tensor in own_state(module, path):
            _check_storable(name, tensor)
            yield name, tensor


def own_state(module: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a module at ``path`` itself, without its children's, by name."""
    prefix = f"{path}." if path else ""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer


def refuse_meta(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`ArtifactError` for a tensor on the meta device."""
    if tensor.is_meta:
        raise ArtifactError(f"{name!r} is on the meta device and has no numbers; load the model's state first.")


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ArtifactError(f"{name!r} has no numbers yet; call the model once with an input, which makes them.")
    refuse_meta(name, tensor)
    if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
        raise ArtifactError(
            f"{name!r} is a {type(tensor).__name__}, which stands for a matrix that it does not hold as numbers, and "
            "cannot be stored. Replace it first, as in layer.weight = nn.Parameter(layer.weight.dequantize())."
        )
    if tensor.layout != torch.strided:
        raise ArtifactError(f"{name!r} is a tensor of layout {tensor.layout}, which cannot be stored; make it dense.")
    try:
        dtype_name(tensor.dtype)
    except ValueError as error:
        raise ArtifactError(f"{name!r}: {error}") from None


def _plain_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is None or isinstance(child, CompressionSimulatorBase) or _is_simulated(child):
            continue
        yield from _plain_modules(child, f"{path}.{name}" if path else name)


def _is_simulated(module: nn.Module) -> bool:
    return isinstance(module, parametrize.ParametrizationList) and any(isinstance(entry, _KINDS) for entry in module)


def _simulators_of(stack: Any, where: str) -> tuple[nn.Module, ...]:
    entries = list(stack)
    first = next((i for i, entry in enumerate(entries) if isinstance(entry, _KINDS)), len(entries))
    for entry in entries[first:]:
        if not isinstance(entry, _KINDS):
            raise ArtifactError(
                f"{where!r}: the parametrization {type(entry).__name__} was registered after compression was "
                "prepared, so the weight that the model uses is not the compressed one. Register it before prepare(), "
                "or remove it."
            )
    return tuple(entries[first:])


def _first_original(stack: Any) -> torch.Tensor:
    tensor: torch.Tensor = stack.original if stack.is_tensor else stack.original0
    return tensor


def _entering(stack: Any, simulated: int) -> torch.Tensor:
    """The tensor after parametrizations of other kinds, such as weight normalization."""
    entries = list(stack)[: len(stack) - simulated]
    if not entries:
        return _first_original(stack)
    with torch.no_grad():
        originals = (
            [stack.original] if stack.is_tensor else [getattr(stack, f"original{i}") for i in range(stack.ntensors)]
        )
        tensor: torch.Tensor = entries[0](*originals)
        for entry in entries[1:]:
            tensor = entry(tensor)
    return tensor
