"""What the two ways of running a pair of models have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bitwright._utils.call_frames import thread_frames
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = [
    "ComparedWeight",
    "Inputs",
    "LayerHook",
    "LayerSite",
    "PairProbe",
    "float_tensors",
    "is_plain",
    "kept",
    "kind_axis",
    "measured_tensors",
    "outside_frames",
]

LayerHook: TypeAlias = Callable[["LayerSite", Any, Any, Any], None]
"""Called with a layer and its outputs: of the float model, of the compressed layer on the float model's inputs (None if
that cannot be had), and of the compressed model (None if it did not run there)."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> Inputs:
        """Return inputs with tensors of their own, for a run: forward may write to what it is given."""
        args, kwargs = kept((tuple(self.args), dict(self.kwargs)))
        return Inputs(args, kwargs)


@dataclass(frozen=True, slots=True)
class ComparedWeight:
    """A weight before and after compression.

    Attributes:
        name: dotted name in the float model.
        reference: the float weight.
        compressed: what the compressed model computes with.
        entering: what enters ``simulator``.
        simulator: the fake quantizer that makes the compressed weight, if there is one.
        alone: whether nothing else compresses the weight.
    """

    name: str
    reference: torch.Tensor
    compressed: torch.Tensor
    entering: torch.Tensor
    simulator: FakeQuantizeImplBase | None
    alone: bool = True


@dataclass(eq=False, slots=True)
class LayerSite:
    """A layer that both models have.

    Attributes:
        name: what the report calls it.
        kind: class or op type.
        module: path of the module that it runs in.
        channel_axis: dimension of channels in its output.
        weights: names of its weights.
        activations: its activation quantizers by name.
        can_substitute: whether it can be run by itself.
    """

    name: str
    kind: str
    module: str
    channel_axis: int
    weights: list[str] = field(default_factory=list)
    activations: dict[str, FakeQuantizeImplBase] = field(default_factory=dict)
    can_substitute: bool = True


class PairProbe(ABC):
    """Runs a float model and its compressed form side by side.

    Attributes:
        mode: ``"eager"`` or ``"graph"``.
        layers: what can be compared, in order of execution.
        notes: what cannot, and why.
        recording: whether activation quantizers are observed: False while a layer is run by itself.
    """

    mode: str

    def __init__(self) -> None:
        self.layers: list[LayerSite] = []
        self.notes: list[str] = []
        self.recording = False

    @abstractmethod
    def run(self, inputs: Inputs, on_layer: LayerHook) -> tuple[Any, Any]:
        """Run both models, layer by layer, and return both outputs."""

    @abstractmethod
    def run_with_only(self, site: LayerSite, inputs: Inputs) -> Any:
        """Run the float model with one layer in its compressed form and return its output.

        None if that fails, or if the layer is not called: others may read its weights.
        """

    @abstractmethod
    def weight(self, name: str) -> ComparedWeight | None:
        """Return a weight of a layer; None where the compressed one cannot be read."""


@contextmanager
def outside_frames() -> Iterator[None]:
    """Keep what is computed in hooks from being taken for calls of the model, which eager simulators count."""
    stack = thread_frames.stack
    shield = bool(stack)
    if shield:
        stack.append(None)
    try:
        yield
    finally:
        if shield:
            stack.pop()


def kept(value: Any) -> Any:
    """Return a copy, of tensors in containers too, that later in-place ops do not change.

    A tensor that stands there twice does so in the copy: attention looks whether its query is its key.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copied, value)


def float_tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a module's output, in order; of complex ones, both parts."""
    found: list[torch.Tensor] = []
    for tensor in measured_tensors(output):
        found += [tensor.real, tensor.imag] if tensor.is_complex() else [tensor]
    return found


def measured_tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point and complex tensors of a module's output, in order."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if not isinstance(leaf, torch.Tensor):
            found += measured_tensors(parts) if (parts := _parts(leaf)) is not None else []
        elif leaf.is_floating_point() or leaf.is_complex():
            found.append(leaf)
    return found


def _parts(value: Any) -> Any:
    """The parts of a mapping or data class that torch takes for one leaf; None for anything else."""
    if isinstance(value, type):
        return None
    if hasattr(value, "keys"):
        return dict(value)
    return [getattr(value, entry.name, None) for entry in fields(value)] if is_dataclass(value) else None


def kind_axis(kind: str) -> int:
    """Return the dimension of channels in the output of a kind of layer: 1 for convolutions, else the last."""
    lowered = kind.lower()
    return 1 if lowered.startswith(("conv", "lazyconv", "batchnorm", "batch_norm", "groupnorm", "max_pool")) else -1


def is_plain(module: nn.Module) -> bool:
    """Return whether a module has no children, parametrizations and simulators apart."""
    children = module.named_children()
    return all(name == "parametrizations" or isinstance(child, FakeQuantizeImplBase) for name, child in children)
