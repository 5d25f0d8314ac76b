"""Side by side in eager mode: modules at the same path, run in two threads that take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitwright._utils.forward_scope import ForwardScope, wrap_forward
from bitwright._utils.parametrization import own_parametrizations
from bitwright.artifact.sites import activation_simulators
from bitwright.program.states import States
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._lockstep import Stepper
from ._probe import ComparedWeight, Inputs, LayerHook, LayerSite, PairProbe, is_plain, kept, kind_axis, outside_frames

__all__ = ["EagerProbe"]


class EagerProbe(PairProbe):
    """Compares modules at the same path.

    Args:
        reference: the float model.
        compressed: a model with the same modules, prepared or finalized in eager mode, or loaded.
    """

    mode = "eager"

    def __init__(self, reference: nn.Module, compressed: nn.Module) -> None:
        super().__init__()
        self.reference, self.compressed = reference, compressed
        self._own = dict(reference.named_modules())
        self._other = dict(compressed.named_modules(remove_duplicate=False))
        self._find_layers()
        alone = [site.name for site in self.layers if site.can_substitute]
        self._states = {name: States(self._other[name], self._own[name]) for name in alone}
        self._begun: dict[str, Any] = {}

    def run(self, inputs: Inputs, on_layer: LayerHook) -> tuple[Any, Any]:
        """Run the models in two threads that take turns; see the base class."""

        own, other = inputs.copied(), inputs.copied()

        def reference(emit: Callable[[Any], None]) -> Any:
            with self._hooked(self._own, emit):
                return self.reference(*own.args, **own.kwargs)

        stepper: Stepper[tuple[LayerSite, int, Any, Any, Any]] = Stepper(reference)
        waiting: dict[tuple[str, int], Any] = {}

        def meet(item: tuple[LayerSite, int, Any, Any, Any]) -> None:
            site, call, _, _, output = item
            found = waiting.pop((site.name, call), None)
            while found is None:
                ahead = stepper.next()
                if ahead is None:
                    return
                isolated = self._isolated(ahead[0], ahead[2], ahead[3])
                if ahead[:2] == (site, call):
                    found = (ahead[4], isolated)
                else:  # the float model calls its modules in another order
                    waiting[ahead[0].name, ahead[1]] = (kept(ahead[4]), isolated)
            on_layer(site, found[0], found[1], output)

        try:
            with self._hooked(self._other, meet):
                self.recording = True
                try:
                    compressed = self.compressed(*other.args, **other.kwargs)
                finally:
                    self.recording = False
            while (left := stepper.next()) is not None:
                on_layer(left[0], left[4], self._isolated(left[0], left[2], left[3]), None)
            return stepper.result, compressed
        finally:
            stepper.close()

    def run_with_only(self, site: LayerSite, inputs: Inputs) -> Any:
        """Run the float model with one module's forward replaced; None for calls of functions, or if none is called."""
        if not site.can_substitute:
            return None
        substitute = _Substitute(self._own[site.name], self._other[site.name])
        undo = wrap_forward(substitute)
        own = inputs.copied()
        try:
            output = self.reference(*own.args, **own.kwargs)
        finally:
            undo()
        return output if substitute.called else None

    def weight(self, name: str) -> ComparedWeight | None:
        """Return a weight by its name in the float model; None where the compressed model has no such tensor."""
        path, _, attribute = name.rpartition(".")
        own, other = self._own[path], self._other.get(path)
        value = getattr(other, attribute, None)
        if not isinstance(value, torch.Tensor) or other is None:
            return None
        reference = getattr(own, attribute)
        simulator, entering = _simulator(other, attribute)
        alone = simulator is None or len(own_parametrizations(other)[attribute]) == 1
        return ComparedWeight(name, reference.detach(), value.detach(), entering, simulator, alone)

    def _find_layers(self) -> None:
        simulators = activation_simulators(self.compressed)
        by_parent: dict[str, dict[str, FakeQuantizeImplBase]] = {}
        for path, simulator in simulators.items():
            parent, _, child = path.rpartition(".")
            by_parent.setdefault(parent, {})[child] = simulator
        missing = []
        for path, module in self._own.items():
            if path.rpartition(".")[2] == "parametrizations" or ".parametrizations." in f".{path}.":
                continue
            weights = _own_tensors(module)
            activations = by_parent.pop(path, {})
            if not weights and not activations:
                continue
            if path not in self._other:
                missing.append(path)
                continue
            if weights or is_plain(module):
                kind = type(module).__name__
                names = [f"{path}.{name}" if path else name for name in weights if self._is_weight(path, name)]
                leaf = is_plain(module) or type(module).__module__.startswith("torch.nn.modules")
                site = LayerSite(path, kind, path, kind_axis(kind), names, activations, can_substitute=leaf)
                self.layers.append(site)
            else:
                self._add_calls(path, activations)
        if missing:
            self.notes.append(f"Not in the compressed model: {', '.join(missing)}.")

    def _is_weight(self, path: str, attribute: str) -> bool:
        """Whether a parameter is worth a row: biases and gains are, if they are compressed."""
        other, own = self._other[path], getattr(self._own[path], attribute)
        return own.ndim > 1 or attribute in own_parametrizations(other)

    def _add_calls(self, path: str, activations: Mapping[str, FakeQuantizeImplBase]) -> None:
        """Add the functions that a module calls itself; of these only the activations can be looked at."""
        calls: dict[str, dict[str, FakeQuantizeImplBase]] = {}
        for child, simulator in activations.items():
            calls.setdefault(child.partition("_quantize_")[0], {})[child] = simulator
        for call, found in calls.items():
            name = f"{path}.{call}" if path else call
            self.layers.append(LayerSite(name, call, path, -1, [], found, can_substitute=False))

    @contextmanager
    def _hooked(self, modules: Mapping[str, nn.Module], emit: Callable[[Any], None]) -> Iterator[None]:
        """Emit the calls of modules; what enters those that are run again is kept, for they may write to it."""
        counts: dict[str, int] = {}
        entered: dict[str, list[Any]] = {}
        thread = threading.get_ident()

        def keep_of(site: LayerSite) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                if threading.get_ident() == thread:
                    with outside_frames():
                        entered.setdefault(site.name, []).append(kept((args, kwargs)))

            return hook

        def begin_of(site: LayerSite) -> Any:
            def hook(_: nn.Module, args: Any) -> None:
                if threading.get_ident() == thread and self.recording:
                    with outside_frames():
                        self._begun[site.name] = self._states[site.name].copied()

            return hook

        def hook_of(site: LayerSite) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                if threading.get_ident() != thread or not self._watching(modules):
                    return
                counts[site.name] = counts.get(site.name, -1) + 1
                if site.name in entered:
                    args, kwargs = entered[site.name].pop()
                with outside_frames():
                    emit((site, counts[site.name], args, kwargs, output))

            return hook

        watched = [site for site in self.layers if site.name in modules and (site.can_substitute or site.weights)]
        handles = [modules[site.name].register_forward_hook(hook_of(site), with_kwargs=True) for site in watched]
        if modules is self._own:
            handles += [
                modules[site.name].register_forward_pre_hook(keep_of(site), with_kwargs=True)
                for site in watched
                if site.can_substitute
            ]
        else:
            handles += [
                modules[site.name].register_forward_pre_hook(begin_of(site)) for site in watched if site.can_substitute
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watching(self, modules: Mapping[str, nn.Module]) -> bool:
        return modules is self._own or self.recording

    def _isolated(self, site: LayerSite, args: Any, kwargs: Any) -> Any:
        """Run a compressed layer by itself: from what it kept when its last call began, and without a trace."""
        if not site.can_substitute:
            return None
        states = self._states[site.name]
        end = states.copied()
        before, self.recording = self.recording, False
        try:
            states.put_back(self._begun.get(site.name, end))
            output = self._other[site.name](*args, **kwargs)
            return kept(output) if end.tensors else output  # it may be what the layer keeps
        finally:
            states.put_back(end)
            self.recording = before


class _Substitute(ForwardScope):
    """Runs another module's forward in place of a module's own."""

    def __init__(self, module: nn.Module, other: nn.Module) -> None:
        super().__init__(module)
        self.other = other
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return self.other(*args, **kwargs)


def _own_tensors(module: nn.Module) -> list[str]:
    """Names of the module's own floating-point parameters, those under parametrizations included."""
    names = [name for name, tensor in module._parameters.items() if tensor is not None and tensor.is_floating_point()]
    return [*names, *own_parametrizations(module)]


def _simulator(module: nn.Module, attribute: str) -> tuple[FakeQuantizeImplBase | None, torch.Tensor]:
    """Return the last fake quantizer on a weight, and what enters it."""
    stack = own_parametrizations(module).get(attribute)
    if stack is None or not stack.is_tensor:
        tensor: torch.Tensor = getattr(module, attribute)
        return None, tensor.detach()
    value, entering, found = stack.original, stack.original, None
    with torch.no_grad():
        for entry in stack:
            if isinstance(entry, FakeQuantizeImplBase):
                found, entering = entry, value
            value = entry(value)
    return found, entering.detach()
