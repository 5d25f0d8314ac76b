"""The eager engine: trace, plan, insert, finalize."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.common import ExportBackend
from bitwright.config.matching import resolve_module_rules
from bitwright.config.spec import CompressionTargetTensor
from bitwright.errors import TraceError, UnplannedCallWarning
from bitwright.planning import Placement, Plan
from bitwright.planning.eager import plan_eager_quantization
from bitwright.planning.simulated_states import trace_weights
from bitwright.planning.unusable_weights import refuse_quantized, refuse_unusable, tensors_needed
from bitwright.program import preserved_state
from bitwright.quantization._engine import Engine, ExampleInputs
from bitwright.quantization._schedule import switch
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .insert import Insertion

__all__ = ["EagerEngine"]


class EagerEngine(Engine):
    """Works on the user's module in place."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__(model, config)
        if config.preserved_attributes:
            warnings.warn(
                "'preserved_attributes' is only supported in graph mode. In eager mode the model keeps all attributes.",
                stacklevel=4,
            )
        self._paths: dict[str, str] = {}
        self._owners: dict[str, tuple[str, ...]] = {}
        self._stacks: Mapping[str, tuple[nn.Module, ...]] = {}

    def plan(self, example: ExampleInputs) -> Plan:
        """Trace one forward and plan for what it called; see the base class."""
        refuse_quantized("Quantizer", self.model, self.config)
        weights = trace_weights(self.model, example.args, example.kwargs)
        self.program, self._stacks = weights.program, weights.stacks
        return plan_eager_quantization(self.config, self.model, self.program, self._stacks)

    def insert(self, example: ExampleInputs, plan: Plan, complete: Callable[[nn.Module], None]) -> nn.Module:
        """Insert into the model in place; see the base class."""
        refuse_unusable("Quantizer", tensors_needed(plan, self.program))
        insertion = Insertion(self.model, self.program, plan, resolve_module_rules(self.config, self.model))
        try:
            _initialise(self.model, insertion, example, self._stacks)
            complete(self.model)
        except BaseException:
            insertion.revert()
            raise
        placements = {id(simulator): placement for simulator, placement in insertion.simulators}
        for name, module in self.model.named_modules():
            placement = placements.get(id(module))
            if placement is None:
                continue
            self._paths[name] = placement.module_path
            self._owners[name] = self.served_by(placement)
        return self.model

    def served_by(self, placement: Placement) -> tuple[str, ...]:
        """Return all modules that own a tied weight, and the one whose configuration decided."""
        if placement.state is None or len(placement.state.owners) < 2:
            return super().served_by(placement)
        owners = [path for path, _ in placement.state.owners]
        return tuple(dict.fromkeys([*owners, placement.module_path]))

    def owners_of(self, name: str) -> tuple[str, ...]:
        """Return those of the last ``insert``."""
        return self._owners[name]

    def module_paths(self) -> Mapping[str, str]:
        """Return the paths of the last ``insert``."""
        return self._paths

    def simulators_of(self, model: nn.Module, path: str) -> list[Any]:
        """Return the simulators among the modules below ``path``."""
        module = model.get_submodule(path)
        return [child for child in module.modules() if isinstance(child, FakeQuantizeImplBase)]

    def finalize(self, model: nn.Module, backend: ExportBackend, mmap_dir: str | None) -> nn.Module:
        """Finalize in place."""
        if backend == ExportBackend._TORCH:
            return model
        from bitwright.export import finalize_eager

        finalized: nn.Module = finalize_eager(model, backend, mmap_dir)
        return finalized


def _initialise(
    model: nn.Module, insertion: Insertion, example: ExampleInputs, stacks: Mapping[str, tuple[nn.Module, ...]]
) -> None:
    """Give every simulator parameters: weights from themselves, activations from one forward of the example inputs."""
    simulators = [simulator for simulator, _ in insertion.simulators]
    for simulator in simulators:
        switch(simulator, observer=True, fake_quant=False)
    with preserved_state(model, writable=simulators):
        for simulator, placement in insertion.simulators:
            if placement.state is not None:
                weight = placement.state.tensor.detach()
                for below in stacks.get(placement.state.name, ()):
                    weight = below(weight)
                simulator(weight)
        for simulator in simulators:
            if simulator.quantization_target == CompressionTargetTensor.WEIGHT:
                simulator.disable_observer()
        _run_once(model, insertion, example)
    for simulator in simulators:
        switch(simulator, observer=False, fake_quant=True)


def _run_once(model: nn.Module, insertion: Insertion, example: ExampleInputs) -> None:
    """Run the example inputs through the simulators of activations, if there are any.

    Warns of those that the forward passes by: without them it has taken another path.

    Raises:
        TraceError: the forward raised, which it does not without simulators.
    """
    activations = {id(one): one for one, placement in insertion.simulators if placement.state is None}
    if not activations:
        return
    missed = {key: one.tensor_fqn for key, one in activations.items()}

    def note(simulator: nn.Module, _: Any) -> None:
        missed.pop(id(simulator), None)

    hooks = [simulator.register_forward_pre_hook(note) for simulator in activations.values()]
    try:
        with torch.no_grad():
            model(*example.args, **example.kwargs)
    except Exception as error:
        raise TraceError(
            f"The model raised {type(error).__name__} once its weights had simulators: {error}. {_OTHER_PATHS}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if missed:
        names = ", ".join(map(repr, missed.values()))
        warnings.warn(
            f"The model takes another path than before it had simulators: {names} saw nothing. {_OTHER_PATHS}",
            UnplannedCallWarning,
            stacklevel=5,
        )


_OTHER_PATHS = (
    "Eager mode gives a module with a quantized weight a subclass of its class, and keeps the weight itself at "
    "parametrizations.<name>.original. A forward that compares type(module) should ask isinstance(module, ...); one "
    "that looks a parameter up in _parameters should read the attribute, as in module.weight. Graph mode takes both as "
    "they are: QuantizerConfig(execution_mode='graph')."
)
