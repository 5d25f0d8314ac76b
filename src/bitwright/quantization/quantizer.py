"""The quantizer: from a float model and a configuration to a model that computes as its quantized form will."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bitwright._utils.heap_memory import heap_kept
from bitwright._utils.mapped_folder import mapped_folder
from bitwright._utils.module_mode import module_mode
from bitwright._utils.prepared_state import load_prepared_state
from bitwright.base_model_compressor import _BaseModelCompressor, _Lifecycle
from bitwright.common import ExportBackend
from bitwright.config.matching import ModuleRule, resolve_module_rules
from bitwright.config.spec import CompressionTargetTensor
from bitwright.planning import Plan
from bitwright.planning.report import report_problems
from bitwright.planning.stacking import QUANTIZED_ACTIVATIONS, QUANTIZED_GRAPH
from bitwright.program.export_errors import not_a_tuple
from bitwright.program.graph_module import TracedGraphModule

from . import _checkpoint
from ._averages import refuse_averaged_buffers, take_over_progress, warn_of_switches
from ._distributed import merged_statistics, sharded_again, synchronized_observers
from ._engine import Engine, ExampleInputs
from ._less_memory import activations_as_codes
from ._schedule import ScheduleDriver, observers_off, rest, switch
from ._statistics import gathering, has_searched_range, warn_of_calibration, warn_of_ranges
from ._validate import check_config
from ._views import _Views
from ._whole_steps import steps_with_forwards
from .config import ExecutionMode, InvalidExecutionModeError, QATSchedule, QuantizerConfig
from .spec import RunningRangeMixin
from .spec.fake_quantize import FakeQuantizeImplBase
from .spec.learned import LearnedQParamsCalculatorBase

__all__ = ["Quantizer"]


class Quantizer(_Views, _BaseModelCompressor):
    """Quantizes a model: ``prepare``, then calibrate or train, then ``finalize``.

    Eager mode works on the model in place; graph mode leaves the module alone and works on an exported copy of its
    program. The copy holds the same parameters and buffers: training it trains the module's own weights.

    Args:
        model: the float model.
        config: what to quantize and how; None for int8 weights and activations in graph mode.

    Raises:
        TypeError: ``model`` is no module, or ``config`` no ``QuantizerConfig``.
        NotImplementedError: the configuration uses string keys where only positions are known.

    Example:
        >>> import torch
        >>> from bitwright.quantization import Quantizer, QuantizerConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> config = QuantizerConfig.presets.w8(execution_mode="eager")
        >>> quantizer = Quantizer(model, config)
        >>> prepared = quantizer.prepare((torch.randn(2, 8),))
        >>> prepared(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, model: nn.Module, config: QuantizerConfig | None = None) -> None:
        super().__init__(model, QuantizerConfig() if config is None else config)
        if not isinstance(self._config, QuantizerConfig):
            raise TypeError(
                f"Quantizer needs a QuantizerConfig, got {type(config).__name__}. Build one from a dict with "
                "QuantizerConfig.from_dict(...), from a file with QuantizerConfig.from_yaml(...)."
            )
        self._engine = _make_engine(model, self._config)
        self._schedules = ScheduleDriver({})
        self._plan: Plan | None = None
        self._calibrated = False
        self._measured = False

    def plan(
        self,
        example_inputs: tuple[Any, ...] = (),
        dynamic_shapes: Any = None,
        export_with_no_grad: bool = True,
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        target: str | None = None,
    ) -> Plan:
        """Return what ``prepare`` would do, with every problem; the model is not changed.

        Args:
            example_inputs: positional inputs of the model.
            dynamic_shapes: passed on to ``torch.export`` (graph mode, and what ``target`` is asked).
            export_with_no_grad: export under ``no_grad`` (graph mode).
            example_kwargs: keyword inputs of the model.
            target: name of a target of ``bitwright export``; what it cannot hold is a problem, too.

        Raises:
            KeyError: there is no such target.
        """
        example = _example(example_inputs, example_kwargs, dynamic_shapes, export_with_no_grad)
        return self._planned(target, example)

    def prepare(
        self,
        example_inputs: tuple[Any, ...] = (),
        dynamic_shapes: Any = None,
        export_with_no_grad: bool = True,
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        target: str | None = None,
        state_dict: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Insert simulators; observers are off and fake quantization is on afterwards.

        Everything is checked first. When something fails the model is as it was.

        Args:
            example_inputs: positional inputs of the model.
            dynamic_shapes: passed on to ``torch.export`` (graph mode, and what ``target`` is asked).
            export_with_no_grad: export under ``no_grad`` (graph mode).
            example_kwargs: keyword inputs of the model.
            strict: turn every problem of the plan into an error, also those that only deserve a warning.
            target: name of a target of ``bitwright export``; what it cannot hold is a problem, too.
            state_dict: that of a model prepared with the same configuration, and in graph mode with example inputs of
                the same shapes, for example after calibration or training: weights and parameters are taken from it.

        Returns:
            The prepared model: the user's own module in eager mode, a new ``GraphModule`` in graph mode.

        Raises:
            PlanError: the configuration cannot be applied (a ``ValueError``); lists all problems.
            RuntimeError: the model is prepared already (graph mode, or with ``state_dict``), or ``state_dict`` does not
                match the prepared model.
            TraceError: the model's forward raised, or ``torch.export`` cannot capture the model (graph mode).
        """
        example = _example(example_inputs, example_kwargs, dynamic_shapes, export_with_no_grad)
        if self._is_model_prepared(self._model) and not self._is_prepared_by_others(self._model, _is_quantizers):
            if self._config.execution_mode == ExecutionMode.GRAPH or state_dict is not None:
                raise RuntimeError("Model has already been prepared. Build a new Quantizer on the float model.")
            warnings.warn("Model has already been prepared; prepare() does nothing.", stacklevel=2)
            return self._model
        plan = self._planned(target, example)
        report_problems(plan.problems, strict)
        rules = resolve_module_rules(self._config, self._engine.model)
        self._warn_of_schedules(plan, rules)
        self._model = self._engine.insert(example, plan, partial(_complete, state_dict=state_dict))
        self._plan = plan
        by_module = {path: rule.config.qat_schedule for path, rule in rules.items() if rule.config.qat_schedule}
        self._schedules = ScheduleDriver(self._schedules_by_simulator(rules), by_module)
        self._mark_model_as_prepared(self._model)
        return self._model

    def _planned(self, target: str | None, example: ExampleInputs) -> Plan:
        if self._config.execution_mode == ExecutionMode.EAGER:
            _tell_of_options(target, example)
        planned = self._engine.plan(example)
        plan = self._checked_for(target, planned, example.args, example.kwargs, example.dynamic_shapes)
        if isinstance(self._model, TracedGraphModule) and any(map(_is_quantizers, self._model.children())):
            plan.problems.append(QUANTIZED_GRAPH)
        elif not self._is_model_prepared(self._model) and any(map(_is_activations, self._model.modules())):
            wanted = any(placement.target == CompressionTargetTensor.ACTIVATION for placement in plan.placements)
            if wanted or self._config.execution_mode == ExecutionMode.GRAPH:
                plan.problems.append(QUANTIZED_ACTIVATIONS)
        return plan

    def _folded(self) -> nn.Module | None:
        return self._engine.folded()

    @property
    def _execution_mode(self) -> ExecutionMode:
        """The mode of the config; programs written for coreai-opt read it."""
        mode: ExecutionMode = self._config.execution_mode
        return mode

    @property
    def applied_config(self) -> QuantizerConfig:
        """The configuration that the quantizer works with."""
        config: QuantizerConfig = self._config
        return config

    @property
    def applied_plan(self) -> Plan | None:
        """The plan that ``prepare`` carried out; None before."""
        return self._plan

    @contextmanager
    def calibration_mode(self, model: nn.Module | None = None) -> Iterator[Self]:
        """Collect ranges inside the ``with`` block: eval mode, observers on, activations not quantized.

        With ``torch.distributed`` initialised, what the processes saw is merged on leaving the block, which all of
        them must do: each then holds what one process would that had seen all batches, batch ``i`` of all joined.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.

        Raises:
            RuntimeError: the model is not prepared, or another mode is active.
        """
        target = self._target(model, "entering calibration mode")
        with self._in_lifecycle(_Lifecycle.CALIBRATING), module_mode(target, training=False):
            self._start_statistics(target)
            for simulator in _simulators(target):
                weight = simulator.quantization_target == CompressionTargetTensor.WEIGHT
                switch(simulator, observer=True, fake_quant=weight)
                if isinstance(simulator.qparams_calculator, LearnedQParamsCalculatorBase):
                    simulator.qparams_calculator.take_as_found()
            try:
                with merged_statistics(_simulators(target)), steps_with_forwards(target):
                    yield self
                sharded_again(target)
                self._measured = True
                warn_of_calibration(target, stacklevel=4)
            finally:
                rest(target)

    @contextmanager
    def training_mode(self, model: nn.Module | None = None, *, save_as_codes: bool | None = None) -> Iterator[Self]:
        """Train with fake quantization inside the ``with`` block; schedules decide where the config has any.

        Where no schedule speaks of observers every observer is on, except that activation ranges which a calibration
        has searched for in a distribution (``percentile``, ``mse``, ``histogram``) stay as they are: a search at each
        step would be slow, and fixed ranges train as well (H. Wu et al., arXiv 2004.09602).

        With ``torch.distributed`` initialised, observed ranges are those of the batches of all processes joined.

        Memory that a step frees stays in the process until the block ends (glibc; not with
        ``BITWRIGHT_IDLE_MEGABYTES=0`` or settings of your own in ``MALLOC_...`` or ``GLIBC_TUNABLES``).

        What a forward pass of the model keeps of fake-quantized tensors for its backward pass is kept as codes of one
        byte (``bitwright.kernels.saved_as_codes``) where they free 8 MiB or more; on a GPU, where that takes a tenth
        more time, only if asked for. Gradients are the same bits.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.
            save_as_codes: True for a GPU too, where a step then has about half as much in use at its peak; False keeps
                tensors as they are, which takes more memory and, on a CPU, up to 7 % less time.

        Raises:
            RuntimeError: the model is not prepared, or another mode is active.
        """
        target = self._target(model, "entering training mode")
        as_codes = nullcontext() if save_as_codes is False else activations_as_codes(target, on_gpu=bool(save_as_codes))
        with self._in_lifecycle(_Lifecycle.TRAINING), module_mode(target, training=True), heap_kept(), as_codes:
            self._start_statistics(target)
            for simulator in _simulators(target):
                switch(simulator, observer=not (self._measured and has_searched_range(simulator)), fake_quant=True)
            self._training_model, self._schedules.measured = target, self._measured
            self._schedules.apply(target)
            try:
                with synchronized_observers(_simulators(target)), steps_with_forwards(target):
                    yield self
            finally:
                self._schedules.release()
                rest(target)

    def step(self) -> None:
        """Advance the schedules by one and apply them.

        Raises:
            RuntimeError: outside ``training_mode``.
        """
        if self._lifecycle is not _Lifecycle.TRAINING:
            raise RuntimeError("step() only has a meaning inside `with quantizer.training_mode():`.")
        if not self._schedules:
            warnings.warn("step() has no effect: there is no qat_schedule in the config.", stacklevel=2)
        self._schedules.step_count += 1
        self._schedules.apply(self._training_model)

    def step_with(self, *optimizers: torch.optim.Optimizer) -> Sequence[RemovableHandle]:
        """Call :meth:`step` after every step of the optimizers that is taken inside ``training_mode``.

        Args:
            *optimizers: usually one; several that step in turn count each step.

        Returns:
            Handles whose ``remove()`` ends it.
        """

        def advance(*_: Any) -> None:
            if self._lifecycle is _Lifecycle.TRAINING and self._schedules:
                self.step()

        return [optimizer.register_step_post_hook(advance) for optimizer in optimizers]

    @property
    def has_schedule(self) -> bool:
        """Whether a ``qat_schedule`` of the config applies to the prepared model."""
        return bool(self._schedules)

    @contextmanager
    def evaluating(self, model: nn.Module | None = None) -> Iterator[Self]:
        """Evaluate in the middle of ``training_mode``: eval mode, observers off, fake quantization as scheduled.

        Args:
            model: a copy that was made in training mode, or takes over its buffers, such as an average of weights
                (``torch.optim.swa_utils.AveragedModel``); its observers are on, also when training is over. The model
                in training when None.

        Raises:
            RuntimeError: outside ``training_mode``, and no model is given.
            ValueError: the model is an average that averages buffers too (``use_buffers=True``).
        """
        if model is None and self._lifecycle is not _Lifecycle.TRAINING:
            raise RuntimeError(
                "evaluating() only has a meaning inside `with quantizer.training_mode():`, or for a copy of the model."
            )
        target = self._training_model if model is None else model
        refuse_averaged_buffers(target, "evaluating()")
        if target is not self._model:
            warn_of_switches(target, self._model, stacklevel=4)
        with module_mode(target, training=False), observers_off(target):
            yield self

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the model's and the optimizer's ``state_dict``.

        Numbers, strings and tensors only, so ``torch.load(..., weights_only=True)`` reads it.

        Raises:
            RuntimeError: the model is not prepared.
        """
        self._require_prepared(self._model)
        return _checkpoint.save(self._model, self._schedules, self._calibrated, self._measured)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state_dict`` was called; load the prepared model's own ``state_dict`` as well.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            RuntimeError: the model is not prepared, or a mode is active.
            TypeError: the state is no mapping.
            ValueError: the state is of another model or another version.
        """
        self._require_prepared(self._model)
        self._require_idle("load_state_dict()")
        self._calibrated, self._measured = _checkpoint.load(self._model, self._schedules, state)
        for calculator in gathering(_simulators(self._model)):
            calculator.is_provisional, calculator.is_loaded = not self._calibrated, self._measured

    def enable_observer(self, module: nn.Module | None = None) -> None:
        """Turn observers on, in the whole model or in one of its modules.

        Raises:
            RuntimeError: a schedule is configured, which owns the switches; or the model is not prepared.
            ValueError: ``module`` is not part of the model.
        """
        for simulator in self._switchable(module):
            simulator.enable_observer()

    def disable_observer(self, module: nn.Module | None = None) -> None:
        """Turn observers off; see :meth:`enable_observer`."""
        for simulator in self._switchable(module):
            simulator.disable_observer()

    def enable_fake_quant(self, module: nn.Module | None = None) -> None:
        """Turn fake quantization on; see :meth:`enable_observer`."""
        for simulator in self._switchable(module):
            simulator.enable_fake_quant()

    def disable_fake_quant(self, module: nn.Module | None = None) -> None:
        """Turn fake quantization off; see :meth:`enable_observer`."""
        for simulator in self._switchable(module):
            simulator.disable_fake_quant()

    def finalize(  # type: ignore[override]  # what the base hands on to any compressor, this one does not take
        self,
        model: nn.Module | None = None,
        backend: ExportBackend | str = ExportBackend.CoreAI,
        *,
        mmap_dir: str | None = None,
    ) -> nn.Module:
        """Return the model in the form that ``backend`` takes; eager mode changes ``model``, if there is no error.

        ``ExportBackend.Torch`` is for evaluation in PyTorch: weights are plain tensors with the values that they are
        quantized to, activations stay simulated.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.
            backend: ``ExportBackend`` member or its value.
            mmap_dir: Core AI only: folder, empty or absent, for file-backed weights; the files must outlive the model.

        Raises:
            RuntimeError: the model is not prepared, or a mode is active.
            ValueError: unknown backend, or ``mmap_dir`` with a backend that has no use for it.
        """
        self._require_idle("finalize()")
        target = self._target(model, "finalization")
        for simulator in _simulators(target):
            simulator.read_switches()
        chosen = ExportBackend(backend)
        folder = mapped_folder(mmap_dir, chosen)
        in_place = self._config.execution_mode == ExecutionMode.EAGER
        with self._schedules.finished_bits(target, stay=in_place) as unfinished:
            if unfinished:
                warnings.warn(
                    f"The qat_schedule had not come to the end of least_bits at step {self._schedules.step_count}; "
                    f"{len(unfinished)} simulators ({unfinished[0]} ...) were trained with more bits than their spec "
                    "has.",
                    stacklevel=2,
                )
            if target is not self._model:
                take_over_progress(target, self._model)
            warn_of_ranges(target, stacklevel=3)
            finalized = self._engine.finalize(target, chosen, folder)
        if chosen == ExportBackend._TORCH:
            for simulator in _simulators(finalized):  # those of a copy that was made while training still observe
                simulator.disable_observer()
        return finalized

    def _target(self, model: nn.Module | None, action: str) -> nn.Module:
        target = self._model if model is None else model
        if not isinstance(target, nn.Module):
            graph = self._config.execution_mode == ExecutionMode.GRAPH
            kind = "a torch.fx.GraphModule" if graph else "an nn.Module"
            raise TypeError(f"The model must be {kind} that prepare() returned, got {type(target).__name__}.")
        self._require_prepared(target, action)
        return target

    def _start_statistics(self, model: nn.Module) -> None:
        """Let running ranges begin with real data: what ``prepare`` saw were example inputs.

        Another model than the quantizer's becomes its own, with what it has seen since ``prepare``.
        """
        self._calibrated = self._calibrated or model is self._model
        self._model = model
        for calculator in gathering(_simulators(sharded_again(model))):
            if calculator.is_provisional:
                calculator.reset_statistics()
            calculator.is_provisional = False
            if isinstance(calculator, RunningRangeMixin):
                calculator.begin_step()
            self._measured = self._measured or calculator.is_loaded

    def _schedules_by_simulator(self, rules: Mapping[str, ModuleRule]) -> dict[str, QATSchedule]:
        found = {name: _schedules(self._engine.owners_of(name), rules) for name in self._engine.module_paths()}
        return {name: next(iter(schedules.values())) for name, schedules in found.items() if schedules}

    def _warn_of_schedules(self, plan: Plan, rules: Mapping[str, ModuleRule]) -> None:
        for placement in plan.placements:
            schedules = _schedules(self._engine.served_by(placement), rules)
            first = next(iter(schedules), None)
            if first is not None and any(schedule != schedules[first] for schedule in schedules.values()):
                warnings.warn(
                    f"The simulator of {placement.name!r} is shared by the modules {', '.join(map(repr, schedules))}, "
                    f"which have different qat_schedules; that of {first!r} holds. Give them one schedule.",
                    stacklevel=3,
                )

    def _switchable(self, module: nn.Module | None) -> list[FakeQuantizeImplBase]:
        self._require_prepared(self._model)
        if self._schedules:
            raise RuntimeError(
                "A qat_schedule is configured, which owns observers and fake quantization. Remove it from the config "
                "to switch them by hand."
            )
        if module is None:
            return _simulators(self._model)
        for root in (self._model, self._engine.model):
            for path, candidate in root.named_modules():
                if candidate is module:
                    return self._engine.simulators_of(self._model, path) or _simulators(module)
        raise ValueError(f"The module {type(module).__name__} is not part of the model that was prepared.")


def _make_engine(model: nn.Module, config: QuantizerConfig) -> Engine:
    check_config(config)
    if config.execution_mode == ExecutionMode.EAGER:
        from ._eager import EagerEngine

        return EagerEngine(model, config)
    if config.execution_mode == ExecutionMode.GRAPH:
        from ._graph import GraphEngine

        return GraphEngine(model, config)
    raise InvalidExecutionModeError(config.execution_mode)


def _example(args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any, no_grad: bool) -> ExampleInputs:
    if not isinstance(args, tuple):
        raise not_a_tuple(args)
    if not args and not kwargs:
        raise ValueError("example_inputs is empty: pass the model's inputs as a tuple, or example_kwargs as a dict.")
    return ExampleInputs(args, dict(kwargs or {}), dynamic_shapes, no_grad)


def _tell_of_options(target: str | None, example: ExampleInputs) -> None:
    """Warn of what eager mode has no use for: it captures nothing, but for a target that is asked about."""
    unused = {
        "dynamic_shapes": example.dynamic_shapes is not None and target is None,
        "export_with_no_grad": not example.no_grad,
    }
    names = " and ".join(name for name, is_unused in unused.items() if is_unused)
    if names:
        verb = "have" if len(names.split()) > 1 else "has"
        remedy = "; pass them to the exporter, or name the target" if unused["dynamic_shapes"] else ""
        warnings.warn(f"{names} {verb} no effect in eager mode{remedy}.", stacklevel=4)


def _schedules(paths: Iterable[str], rules: Mapping[str, ModuleRule]) -> dict[str, QATSchedule]:
    """Return the schedules of those modules that have one."""
    found = {path: rules[path].config.qat_schedule for path in paths if path in rules}
    return {path: schedule for path, schedule in found.items() if schedule}


def _simulators(model: nn.Module) -> list[FakeQuantizeImplBase]:
    return [module for module in model.modules() if isinstance(module, FakeQuantizeImplBase)]


def _complete(prepared: nn.Module, state_dict: Mapping[str, Any] | None) -> None:
    """Note that activations have seen example inputs only, and load what another prepared model has seen."""
    for calculator in gathering(_simulators(prepared)):
        calculator.is_provisional = True
    if state_dict is not None:
        load_prepared_state(prepared, state_dict, _has_parameters)
        rest(prepared)


def _has_parameters(simulator: nn.Module) -> bool:
    scale = getattr(getattr(simulator, "qparams_calculator", None), "scale", None)
    return not isinstance(scale, torch.Tensor) or scale.numel() > 0


def _is_quantizers(simulator: nn.Module) -> bool:
    """Whether a ``Quantizer`` inserted it; a palettizer has such simulators of its own, for its tables."""
    return isinstance(simulator, FakeQuantizeImplBase) and simulator.quantization_target != CompressionTargetTensor.LUT


def _is_activations(simulator: nn.Module) -> bool:
    """Whether a ``Quantizer`` inserted it for an activation."""
    return _is_quantizers(simulator) and simulator.quantization_target == CompressionTargetTensor.ACTIVATION
