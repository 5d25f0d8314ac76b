"""The palettizer: from a float model and a configuration to a model whose weights are indices into palettes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from bitwright._utils.prepared_state import load_prepared_state
from bitwright._utils.sharded import is_sharded
from bitwright._utils.weight_simulators import simulator_places
from bitwright._weight_compressor import InsertedSimulators, WeightCompressor
from bitwright.base_model_compressor import _Lifecycle
from bitwright.common import CompressionType
from bitwright.errors import BitwrightWarning
from bitwright.palettization.config import KMeansPalettizerConfig, PATSchedule
from bitwright.palettization.spec import PalettizationSpec
from bitwright.planning import Placement, Plan
from bitwright.planning.ops import AxisConflictError, default_weight_axes
from bitwright.planning.palettized import PalettizationTechnique
from bitwright.planning.stacking import kinds_on

from ._palettized_places import (
    PalettizedPlace,
    dense_weights,
    gradients_of,
    palettized_places,
    settle_all,
    settle_before_saving,
    switch,
)
from .kmeans_fake_palettize import _KMeansFakePalettize
from .sensitivity import CalibrationHelper, load_sensitivities, save_sensitivities
from .supported_ops_registry import _KMeansPalettizerSupportedOpsRegistry

__all__ = ["KMeansPalettizer"]

_logger = logging.getLogger(__name__)

_STATE_VERSION = 2
_STATE_KEYS = {
    1: {"version", "step_count", "outdated"},
    _STATE_VERSION: {"version", "step_count", "outdated", "sensitivities"},
}
_SKIPPED = frozenset({"group-size", "cluster-dim"})


class KMeansPalettizer(WeightCompressor):
    """Palettizes the weights of a model in place: ``prepare``, then calibrate or train, then ``finalize``.

    Args:
        model: the float model; a pruned one may be palettized too.
        config: what to palettize and how; None for 4 bit and one palette per weight.

    Raises:
        TypeError: ``model`` is no module, or ``config`` no ``KMeansPalettizerConfig``.

    Example:
        >>> import torch
        >>> from bitwright.palettization import KMeansPalettizer
        >>> model = torch.nn.Linear(32, 16)
        >>> palettized = KMeansPalettizer(model).prepare((torch.randn(2, 32),))
        >>> len(palettized.weight.unique())
        16
    """

    _config_type: ClassVar[type[Any]] = KMeansPalettizerConfig
    _simulator_type: ClassVar[type[Any]] = _KMeansFakePalettize
    _technique: ClassVar[PalettizationTechnique] = PalettizationTechnique(_KMeansPalettizerSupportedOpsRegistry)

    def __init__(self, model: nn.Module, config: KMeansPalettizerConfig | None = None) -> None:
        super().__init__(model, config)
        self._step_count = 0
        self._num_workers = 1
        self._given: dict[str, torch.Tensor] | None = None
        self._schedules: dict[str, PATSchedule] = {}
        self._active: nn.Module | None = None

    @classmethod
    def get_op_type_resolver(cls) -> Callable[[Callable[..., Any]], str | None]:
        """Return what maps a function to its ``op_type_config`` key, None for one whose weights stay as they are."""
        return _KMeansPalettizerSupportedOpsRegistry.key_for_func

    def prepare(
        self,
        example_inputs: tuple[Any, ...] = (),
        sensitivity_path: str | PathLike[str] | None = None,
        num_workers: int = 1,
        state_dict: Mapping[str, Any] | None = None,
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        target: str | None = None,
    ) -> nn.Module:
        """Find palettes for the weights and put them in their place. Create optimizers afterwards.

        Everything is checked first. When something fails the model is as it was.

        Args:
            example_inputs: positional inputs of the model.
            sensitivity_path: file of ``save_sensitivities`` or of ``calibration_mode``, for weighted clustering.
            num_workers: accepted for code written for coreai-opt; each weight is clustered by all of torch's threads.
            state_dict: that of a model palettized with the same configuration: weights, palettes and indices are taken
                from it, and nothing is clustered.
            example_kwargs: keyword inputs of the model.
            strict: turn every problem of the plan into an error, also those that only deserve a warning.
            target: name of a target of ``bitwright export``; what it cannot hold is a problem, too.

        Raises:
            PlanError: the configuration cannot be applied (a ``ValueError``); lists all problems.
            RuntimeError: the model is palettized already, a weight cannot be clustered, or ``state_dict`` does not
                match the prepared model.
            TraceError: the model's forward raised.
            ValueError: ``num_workers`` below 1, or a sensitivity of another shape than its weight.
        """
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ValueError(f"num_workers must be >= 1, got {num_workers!r}.")
        self._refuse_prepared()
        self._num_workers = num_workers
        self._given = None if sensitivity_path is None else load_sensitivities(Path(sensitivity_path))
        self._insert_planned(example_inputs, example_kwargs, strict, target, state_dict)
        self._schedules = self._schedules_by_weight()
        settle_before_saving(self._model)
        return self._model

    def _report(self, plan: Plan, strict: bool) -> None:
        super()._report(plan, strict)
        for problem in plan.problems:
            if problem.code in _SKIPPED:
                _logger.warning("Skipping palettization of %r: %s", problem.where, problem.message)

    def _build(self, placement: Placement, below: tuple[nn.Module, ...]) -> _KMeansFakePalettize:
        spec, state = placement.spec, placement.state
        assert isinstance(spec, PalettizationSpec)
        assert state is not None
        config = self._rules[placement.module_path].config
        try:
            axes = default_weight_axes(state)
        except AxisConflictError:
            axes = None
        return _KMeansFakePalettize(
            **{name: getattr(spec, name) for name in type(spec).model_fields},
            enable_fast_kmeans_mode=config.enable_fast_kmeans_mode,
            rounding_precision=config.rounding_precision,
            vector_kmeans_config=config.vector_kmeans_config,
            op_to_optimize=state.uses[0].op.target if state.uses else None,
            output_axis=None if axes is None else axes.channel,
            preserve_zeros=CompressionType.PRUNING in kinds_on(below),
        )

    def _initialise(self, inserted: InsertedSimulators) -> None:
        if self._given is not None:
            self._set_sensitivities(self._given, self._model)
        settle_all(palettized_places(self._model), self._num_workers)

    def _initialise_from(self, state_dict: Mapping[str, Any], inserted: InsertedSimulators) -> None:
        if self._given is not None:
            self._set_sensitivities(self._given, self._model)
        load_prepared_state(self._model, state_dict, _has_palettes)
        for place in palettized_places(self._model):
            place.simulator.with_zeros_kept(place.entering())
            place.simulator.enable_fake_palett(True)

    def _schedules_by_weight(self) -> dict[str, PATSchedule]:
        """Return the schedule of each palettized weight that has one, by the weight's name."""
        assert self._plan is not None
        found: dict[str, PATSchedule] = {}
        for placement in self._plan.placements:
            schedule = self._rules[placement.module_path].config.pat_schedule
            if schedule is not None:
                found[placement.name] = schedule
        return found

    @contextmanager
    def calibration_mode(  # type: ignore[override]  # importance is found from a loss
        self,
        model: nn.Module | None = None,
        *,
        loss_fn: Callable[..., torch.Tensor],
        sensitivity_path: str | PathLike[str] | None = None,
    ) -> Iterator[CalibrationHelper]:
        """Find out inside the ``with`` block how much the loss depends on each weight; cluster anew on its end.

        The block runs in eval mode with dense weights and with gradients: run a batch through the model and hand output
        and target to ``step``. If it raises, everything is as before.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.
            loss_fn: called with output and target; returns a loss (summed if it is no scalar).
            sensitivity_path: where to write the sensitivities of all parameters; safetensors, or for ``.pt`` and the
                like the format of ``torch.save``.

        Yields:
            An object with ``step(output, target)`` and mergeable ``statistics``.

        Raises:
            RuntimeError: the model is not prepared, another mode is active, or ``step`` was never called.
            TypeError: ``loss_fn`` is no function, or returns no tensor.
            FileNotFoundError: the folder of ``sensitivity_path`` does not exist.
            ValueError: gradients were not finite.
        """
        target = self._target(model, "entering calibration mode")
        if sensitivity_path is not None and not Path(sensitivity_path).absolute().parent.is_dir():
            raise FileNotFoundError(f"sensitivity_path={str(sensitivity_path)!r} is in a folder that does not exist.")
        places = palettized_places(target)
        with self._mode(target, _Lifecycle.CALIBRATING), dense_weights(places), torch.enable_grad():
            with gradients_of(target, places) as parameters:
                helper = CalibrationHelper(parameters, loss_fn)
                yield helper
            helper.statistics.all_reduce(parameters)
            if helper.statistics.steps == 0:
                raise RuntimeError(
                    "calibration_mode requires at least one call to step() before exiting: run a batch through the "
                    "model and hand its output and target to step()."
                )
            sensitivities = helper.statistics.sensitivities()
            if sensitivity_path is not None:
                save_sensitivities(sensitivities, Path(sensitivity_path))
            self._recluster(sensitivities, target, places)

    def _recluster(
        self, sensitivities: Mapping[str, torch.Tensor], target: nn.Module, places: list[PalettizedPlace]
    ) -> None:
        """Cluster with sensitivities; on an error all palettes are as before."""
        before = [place.simulator.snapshot() for place in places]
        try:
            self._set_sensitivities(sensitivities, target)
            settle_all(places, self._num_workers)
        except BaseException:
            for place, snapshot in zip(places, before, strict=True):
                place.simulator.restore(snapshot)
            raise

    def _set_sensitivities(self, sensitivities: Mapping[str, torch.Tensor], model: nn.Module) -> None:
        """Hand each simulator its sensitivities, whichever name of a shared weight they stand under."""
        found: dict[int, torch.Tensor] = {}
        for place in simulator_places(model, _KMeansFakePalettize):
            entry = sensitivities.get(place.parameter_name, sensitivities.get(place.name))
            if entry is None or id(place.simulator) in found:
                continue
            _check_sensitivities(entry, place)
            found[id(place.simulator)] = entry
        missing = []
        for place in palettized_places(model):
            entry = found.get(id(place.simulator))
            if entry is None:
                missing.append(place.name)
            else:
                place.simulator.sensitivities = entry.to(place.original.device)
        if missing:
            warnings.warn(
                f"No sensitivities for {', '.join(map(repr, missing))}; these weights are clustered without.",
                BitwrightWarning,
                stacklevel=6,
            )

    def save_sensitivities(self, path: str | PathLike[str]) -> None:
        """Write the sensitivities of all palettized weights, for ``prepare(sensitivity_path=...)``.

        Args:
            path: safetensors file, or for ``.pt`` and the like one of ``torch.save``.

        Raises:
            RuntimeError: the model is not prepared.
            ValueError: there are none; calibrate first.
        """
        target = self._target(None, "save_sensitivities()")
        known = _known_sensitivities(target)
        if not known:
            raise ValueError("No sensitivities found. Run calibration_mode(loss_fn=...) first.")
        save_sensitivities(known, Path(path))

    @contextmanager
    def training_mode(self, model: nn.Module | None = None) -> Iterator[Self]:
        """Train inside the ``with`` block as schedules and training strategies say; palettes are settled on its end.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.

        Raises:
            RuntimeError: the model is not prepared, or another mode is active.
        """
        target = self._target(model, "entering training mode")
        with self._mode(target, _Lifecycle.TRAINING):
            self._active = target
            try:
                self._apply_schedules()
                yield self
            except BaseException:
                self._complete_after_error(target)
                raise
            finally:
                self._active = None
            self._complete(target)

    def step(self) -> None:
        """Count a training step and let the schedules switch palettization on.

        Raises:
            RuntimeError: outside ``training_mode``.
        """
        if self._lifecycle is not _Lifecycle.TRAINING:
            raise RuntimeError("step() must be called inside a training_mode block.")
        self._step_count += 1
        self._apply_schedules()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the model's and the optimizer's ``state_dict``.

        The steps so far, the weights whose palettes are to be made anew because they were just switched on, and the
        sensitivities, each by the name of its parameter.

        Raises:
            RuntimeError: the model is not prepared.
        """
        target = self._target(None, "state_dict()")
        outdated = [place.parameter_name for place in palettized_places(target) if place.simulator.is_outdated]
        return {
            "version": _STATE_VERSION,
            "step_count": self._step_count,
            "outdated": outdated,
            "sensitivities": _known_sensitivities(target),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state_dict`` was called; load the prepared model's own ``state_dict`` before.

        Args:
            state: what ``state_dict`` returned; one of version 1, without sensitivities, leaves those that there are.

        Raises:
            RuntimeError: the model is not prepared, or a mode is active.
            TypeError: the state is no mapping.
            ValueError: the state is of another compressor, model or version; nothing has been changed.
        """
        target = self._target(None, "load_state_dict()")
        self._require_idle("load_state_dict()")
        if not isinstance(state, Mapping):
            raise TypeError(f"Expected what KMeansPalettizer.state_dict() returned, got {type(state).__name__}.")
        version = state.get("version")
        if not isinstance(version, int) or set(state) != _STATE_KEYS.get(version):
            raise ValueError(
                f"This is no state of a KMeansPalettizer (version {_STATE_VERSION}): it has {sorted(state)}, version "
                f"{version!r}. Pass what KMeansPalettizer.state_dict() returned."
            )
        places = {place.parameter_name: place for place in palettized_places(target)}
        known = state.get("sensitivities", {})
        unknown = sorted({*state["outdated"], *known} - places.keys())
        if unknown:
            raise ValueError(f"The state does not belong to this model, which has no palettes for {unknown}.")
        for name, entry in known.items():
            _check_sensitivities(entry, places[name])
        self._step_count = int(state["step_count"])
        if "sensitivities" in state:
            for name, place in places.items():
                entry = known.get(name)
                place.simulator.restore_sensitivities(None if entry is None else entry.to(place.original.device))
        for name in state["outdated"]:
            places[name].simulator.invalidate()

    def _apply_schedules(self) -> None:
        assert self._active is not None
        names = {id(p.simulator): p.name for p in simulator_places(self._active, _KMeansFakePalettize)}
        for place in palettized_places(self._active):
            schedule = self._schedules.get(names[id(place.simulator)], self._schedules.get(place.name))
            if schedule is not None:
                switch(place.simulator, schedule._compute_state(self._step_count))

    def _complete(self, target: nn.Module, *, together: bool = True) -> None:
        """Switch palettization on everywhere, and bring palettes and indices up to date.

        Those of weights that other processes hold parts of wait for the next call unless all processes are here.
        """
        places = palettized_places(target)
        for place in places:
            switch(place.simulator, True)
            place.simulator.expect_moved_weight()
        unsettled = [place for place in places if not place.simulator.is_settled]
        if not together:
            unsettled = [place for place in unsettled if not is_sharded(place.original)]
        if unsettled:
            settle_all(unsettled, self._num_workers)

    def _complete_after_error(self, target: nn.Module) -> None:
        """Do what can be done of :meth:`_complete`, so that the error of the caller's block is the one that is told."""
        try:
            self._complete(target, together=False)
        except Exception as error:
            warnings.warn(
                f"training_mode() was left by an error, and the palettes of the weights as they are now could not be "
                f"found: {error} They are sought again when next needed.",
                BitwrightWarning,
                stacklevel=4,
            )


def _has_palettes(simulator: nn.Module) -> bool:
    return not isinstance(simulator, _KMeansFakePalettize) or simulator.centroids is not None


def _known_sensitivities(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sensitivities of those palettized weights that have some, by parameter name."""
    found = {place.parameter_name: place.simulator.sensitivities for place in palettized_places(model)}
    return {name: entry for name, entry in found.items() if entry is not None}


def _check_sensitivities(entry: torch.Tensor, place: PalettizedPlace) -> None:
    if entry.shape != place.original.shape:
        raise ValueError(
            f"The sensitivities of {place.name!r} have shape {tuple(entry.shape)}, the weight has shape "
            f"{tuple(place.original.shape)}. They belong to another model."
        )
