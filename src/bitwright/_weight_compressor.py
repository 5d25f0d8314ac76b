"""What ``KMeansPalettizer`` and ``MagnitudePruner`` share: plan, insert, finalize, and the checks around them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, ClassVar

from torch import nn

from bitwright._utils.mapped_folder import mapped_folder
from bitwright._utils.module_mode import has_modes, module_mode
from bitwright._utils.own_states import list_own_states
from bitwright._utils.parametrization import parametrize_tensor
from bitwright.base_model_compressor import _BaseModelCompressor, _Lifecycle
from bitwright.common import ExportBackend
from bitwright.config.matching import ModuleRules, resolve_module_rules
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.planning import Placement, Plan
from bitwright.planning.report import report_problems
from bitwright.planning.simulated_states import WeightProgram, trace_weights
from bitwright.planning.unusable_weights import refuse_quantized, refuse_unusable
from bitwright.planning.weight_only import WeightTechnique, plan_weights
from bitwright.program import Program
from bitwright.program.export_errors import not_a_tuple

__all__ = ["InsertedSimulators", "WeightCompressor"]


class InsertedSimulators:
    """The simulators that ``prepare`` put into a model, with the way back.

    Attributes:
        placed: each simulator with the placement that it came from.
    """

    def __init__(self, model: nn.Module) -> None:
        self.placed: list[tuple[Any, Placement]] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._has_modes = has_modes(model)  # what torch.export captured says nothing in its flags
        self._undo: list[Callable[[], Any]] = []

    def insert(self, simulator: CompressionSimulatorBase, placement: Placement) -> None:
        """Put a simulator on every place of its weight."""
        assert placement.state is not None
        simulator.tensor_fqn = placement.state.name
        done: set[tuple[int, str]] = set()
        for path, attribute in placement.state.owners:
            module = self._modules[path]
            if (id(module), attribute) not in done:
                done.add((id(module), attribute))
                self._undo.append(parametrize_tensor(module, attribute, simulator))
        simulator.train(self._modules[placement.state.owners[0][0]].training and self._has_modes)
        self.placed.append((simulator, placement))

    def list_own_states(self, program: Program) -> None:
        """Let forwards that go over the model's states, as ``program`` has found them, find what they did before."""
        listed, readers = ([self._modules[path] for path in paths] for paths in (program.listed, program.readers))
        self._undo += list_own_states(listed, readers)

    def revert(self) -> None:
        """Put the model back to what it was before."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


class WeightCompressor(_BaseModelCompressor):
    """A compressor whose simulators stand on weights.

    Attributes:
        _config_type: class of its configuration.
        _simulator_type: base class of its simulators.
        _technique: what is particular while planning.
    """

    _config_type: ClassVar[type[Any]]
    _simulator_type: ClassVar[type[Any]]
    _technique: ClassVar[WeightTechnique]

    def __init__(self, model: nn.Module, config: Any = None) -> None:
        super().__init__(model, self._config_type() if config is None else config)
        if not isinstance(self._config, self._config_type):
            raise TypeError(
                f"{type(self).__name__} needs a {self._config_type.__name__}, got {type(config).__name__}. Build one "
                f"from a dict with {self._config_type.__name__}.from_dict(...), from a file with .from_yaml(...)."
            )
        self._plan: Plan | None = None
        self._rules: ModuleRules

    def plan(
        self,
        example_inputs: tuple[Any, ...] = (),
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        target: str | None = None,
    ) -> Plan:
        """Return what ``prepare`` would do, with every problem; the model is not changed.

        Args:
            example_inputs: positional inputs of the model.
            example_kwargs: keyword inputs of the model.
            target: name of a target of ``bitwright export``; what it cannot hold is a problem, too.

        Raises:
            TraceError: the model's forward raised.
            KeyError: there is no such target.
        """
        plan = self._plan_for(self._trace(example_inputs, example_kwargs))
        return self._checked_for(target, plan, example_inputs, example_kwargs)

    def _trace(self, example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> WeightProgram:
        if not isinstance(example_inputs, tuple):
            raise not_a_tuple(example_inputs)
        refuse_quantized(type(self).__name__, self._model, self._config)
        return trace_weights(self._model, example_inputs, example_kwargs)

    def _plan_for(self, traced: WeightProgram) -> Plan:
        return plan_weights(self._config, self._model, traced, self._technique)

    def _insert_planned(
        self,
        example_inputs: Any,
        example_kwargs: Mapping[str, Any] | None,
        strict: bool,
        target: str | None,
        state_dict: Mapping[str, Any] | None = None,
    ) -> InsertedSimulators:
        """Plan, report, insert and initialise; on an error the model is as it was."""
        self._refuse_prepared()
        self._rules = resolve_module_rules(self._config, self._model)
        traced = self._trace(example_inputs, example_kwargs)
        plan = self._checked_for(target, self._plan_for(traced), example_inputs, example_kwargs)
        self._report(plan, strict)
        states = [placement.state for placement in plan.placements if placement.state is not None]
        refuse_unusable(type(self).__name__, {state.name: state.tensor for state in states})
        inserted = InsertedSimulators(self._model)
        try:
            for placement in plan.placements:
                assert placement.state is not None
                below = traced.stacks.get(placement.state.name, ())
                inserted.insert(self._build(placement, below), placement)
            inserted.list_own_states(traced.program)
            if state_dict is None:
                self._initialise(inserted)
            else:
                self._initialise_from(state_dict, inserted)
        except BaseException:
            inserted.revert()
            raise
        self._plan = plan
        self._mark_model_as_prepared(self._model)
        return inserted

    def _report(self, plan: Plan, strict: bool) -> None:
        report_problems(plan.problems, strict, stacklevel=5)

    @abstractmethod
    def _build(self, placement: Placement, below: tuple[nn.Module, ...]) -> CompressionSimulatorBase:
        """Return the simulator of a placement; ``below`` are those that the weight passes through before."""

    @abstractmethod
    def _initialise(self, inserted: InsertedSimulators) -> None:
        """Give the simulators their state."""

    @abstractmethod
    def _initialise_from(self, state_dict: Mapping[str, Any], inserted: InsertedSimulators) -> None:
        """Give the simulators, and the model, the state of a model that was prepared alike."""

    def finalize(  # type: ignore[override]  # what the base hands on to any compressor, this one does not take
        self,
        model: nn.Module | None = None,
        backend: ExportBackend | str = ExportBackend.CoreAI,
        *,
        mmap_dir: str | PathLike[str] | None = None,
    ) -> nn.Module:
        """Return the model in the form that ``backend`` takes; a further compressor may be applied afterwards.

        ``ExportBackend._TORCH`` leaves the simulators where they are, so that another technique can be put on top of
        them; ``Torch`` puts the weights' values in their places; the other backends replace simulators, of whatever
        technique, by what the backend takes.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.
            backend: ``ExportBackend`` member or its value.
            mmap_dir: Core AI only: folder, empty or absent, for file-backed weights; the files must outlive the model.

        Raises:
            RuntimeError: the model is not prepared, or a mode is active.
            TypeError: ``model`` is no module.
            NotImplementedError: there is no such backend.
            ValueError: ``mmap_dir`` with a backend that has no use for it, or the backend cannot hold the model.
        """
        self._require_idle("finalize()")
        target = self._target(model, "finalize()")
        try:
            chosen = ExportBackend(backend)
        except ValueError as error:
            known = ", ".join(repr(member.value) for member in ExportBackend)
            raise NotImplementedError(f"There is no backend {backend!r}; choose one of {known}.") from error
        folder = mapped_folder(mmap_dir, chosen)
        self._complete(target)
        finalized = target
        if chosen is not ExportBackend._TORCH:
            from bitwright.export import finalize_eager

            finalized = finalize_eager(target, chosen, folder)
        self._unmark_model(finalized)
        return finalized

    def _complete(self, target: nn.Module) -> None:
        """Bring a model that is about to be finalized to its end; called by ``finalize`` once its arguments are known.

        Nothing is left to do unless a technique says so.
        """

    def _refuse_prepared(self) -> None:
        """A model that another technique prepared may be prepared again; one that this one prepared may not."""
        own = self._simulator_type
        if self._is_model_prepared(self._model) and not self._is_prepared_by_others(
            self._model, lambda simulator: isinstance(simulator, own)
        ):
            raise RuntimeError(
                f"Model has already been prepared. {type(self).__name__}.prepare() works once per model; build a new "
                "one on the float model to prepare it differently."
            )

    def _target(self, model: nn.Module | None, action: str) -> nn.Module:
        target = self._model if model is None else model
        if not isinstance(target, nn.Module):
            raise TypeError(f"Expected a prepared model, got {type(target).__name__}.")
        self._require_prepared(target, action)
        return target

    @contextmanager
    def _mode(self, target: nn.Module, state: _Lifecycle) -> Iterator[None]:
        """Hold a lifecycle state, with the model in train mode for training and in eval mode otherwise."""
        with self._in_lifecycle(state), module_mode(target, training=state is _Lifecycle.TRAINING):
            yield
