"""The pruner: from a float model and a configuration to a model whose unimportant weights are zero."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import nn

from bitwright._utils.prepared_state import load_prepared_state
from bitwright._utils.weight_simulators import SimulatorPlace, unique_simulators
from bitwright._weight_compressor import InsertedSimulators, WeightCompressor
from bitwright.base_model_compressor import _Lifecycle
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.errors import BitwrightWarning
from bitwright.planning import Placement
from bitwright.planning.ops import default_weight_axes
from bitwright.planning.pruned import PruningTechnique, ranks_rows
from bitwright.program.model import StateTensor

from ._calibration import calibrate, is_adjusted
from ._collector import InputCollector
from .channel_removal import ShrinkReport, shrink
from .config import MagnitudePrunerConfig
from .spec import PruneImplBase, PruningSpec
from .spec.scheme import keep_largest

__all__ = ["MagnitudePruner"]


class MagnitudePruner(WeightCompressor):
    """Prunes the weights of a model in place: ``prepare``, then calibrate or train, then ``finalize``.

    Args:
        model: the float model; one that another technique prepared may be pruned too.
        config: what to prune and how; None for half of all weights by magnitude.

    Raises:
        TypeError: ``model`` is no module, or ``config`` no ``MagnitudePrunerConfig``.

    Example:
        >>> import torch
        >>> from bitwright.pruning import MagnitudePruner
        >>> model = torch.nn.Linear(8, 4)
        >>> pruned = MagnitudePruner(model).prepare((torch.randn(2, 8),))
        >>> int((pruned.weight == 0).sum())
        16
    """

    _config_type: ClassVar[type[Any]] = MagnitudePrunerConfig
    _simulator_type: ClassVar[type[Any]] = PruneImplBase
    _technique: ClassVar[PruningTechnique] = PruningTechnique()

    def __init__(self, model: nn.Module, config: MagnitudePrunerConfig | None = None) -> None:
        super().__init__(model, config)
        self._idle_steps = 0
        self._active: nn.Module | None = None

    def prepare(
        self,
        example_inputs: tuple[Any, ...] = (),
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        target: str | None = None,
        state_dict: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Put masks on the weights, in place. Create optimizers afterwards.

        Schedules are at step 0. Algorithms that want calibration go by magnitude until they had it. Everything is
        checked first; when something fails the model is as it was.

        Args:
            example_inputs: positional inputs of the model.
            example_kwargs: keyword inputs of the model.
            strict: turn every problem of the plan into an error, also those that only deserve a warning.
            target: name of a target of ``bitwright export``; what it cannot hold is a problem, too.
            state_dict: that of a model pruned with the same configuration: weights, masks and steps of schedules are
                taken from it.

        Raises:
            PlanError: the configuration cannot be applied (a ``ValueError``); lists all problems.
            RuntimeError: the model is pruned already, or ``state_dict`` does not match it.
            TraceError: the model's forward raised.
        """
        self._insert_planned(example_inputs, example_kwargs, strict, target, state_dict)
        return self._model

    def _build(self, placement: Placement, below: tuple[nn.Module, ...]) -> PruneImplBase:
        spec, state = placement.spec, placement.state
        assert isinstance(spec, PruningSpec)
        assert state is not None
        axes = default_weight_axes(state) if ranks_rows(spec) else None
        row_axis = 0 if axes is None else axes.channel
        impl: PruneImplBase = spec.pruning_algo(
            target_sparsity=spec.target_sparsity,
            pruning_scheme=spec.pruning_scheme,
            scope=spec.scope,
            row_axis=row_axis,
            row_groups=_groups(state) if row_axis == 1 else 1,
        )
        impl.schedule = self._rules[placement.module_path].config.sparsity_schedule
        return impl

    def _initialise(self, inserted: InsertedSimulators) -> None:
        for impl, _ in inserted.placed:
            if impl.schedule is not None:
                impl.update_sparsity(0)
        self._make_masks(self._model)

    def _initialise_from(self, state_dict: Mapping[str, Any], inserted: InsertedSimulators) -> None:
        def other_steps() -> list[str]:
            counts = {impl.steps for impl, _ in inserted.placed}
            return [f"its weights are at different steps, {sorted(counts)}"] if len(counts) > 1 else []

        load_prepared_state(self._model, state_dict, _has_mask, other_steps)
        self._make_masks(self._model)

    @property
    def _step_count(self) -> int:
        places = self._places(self._training_model)
        return places[0].simulator.steps if places else self._idle_steps

    @property
    def _training_model(self) -> nn.Module:
        return self._model if self._active is None else self._active

    def step(self) -> None:
        """Count a training step and let scheduled weights follow: sparsity, and a mask made anew from the dense weight.

        The count is part of the model's ``state_dict``.

        Raises:
            RuntimeError: the model is not prepared.
        """
        target = self._target(self._training_model, "step()")
        self._idle_steps += 1
        for place in self._places(target):
            place.simulator.advance()
        self._make_masks(target)

    @contextmanager
    def training_mode(self, model: nn.Module | None = None) -> Iterator[Self]:
        """Train with masks inside the ``with`` block; call :meth:`step` after each optimizer step.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.

        Raises:
            RuntimeError: the model is not prepared, or another mode is active.
        """
        target = self._target(model, "entering training mode")
        with self._mode(target, _Lifecycle.TRAINING):
            self._active = target
            try:
                yield self
            finally:
                self._active = None

    @contextmanager
    def calibration_mode(self, model: nn.Module | None = None) -> Iterator[Self]:
        """Run calibration data through the dense model inside the ``with`` block; masks follow on its end.

        The block runs in eval mode under ``no_grad``. Statistics are merged over batches and, where
        ``torch.distributed`` runs, over processes. If the block raises, everything is as before.

        Args:
            model: a prepared model; the one that ``prepare`` returned when None.

        Raises:
            RuntimeError: the model is not prepared, another mode is active, or no data came.
            ValueError: the inputs of a pruned layer were not finite, or a weight that is to be adjusted is an expanded
                tensor; names the weights.
        """
        target = self._target(model, "entering calibration mode")
        places = self._places(target)
        collector = InputCollector(places)
        with self._mode(target, _Lifecycle.CALIBRATING), torch.no_grad():
            with collector:
                yield self
            self._apply(target, places, collector)
            self._make_masks(target)

    def shrink(
        self,
        example_inputs: tuple[Any, ...] = (),
        model: nn.Module | None = None,
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        keep: Collection[str] = (),
    ) -> ShrinkReport:
        """Make the masks permanent and remove channels of zeros, in place; see :func:`bitwright.pruning.shrink`.

        The model is an ordinary one afterwards, which any compressor may prepare.

        Args:
            example_inputs: positional inputs of the model.
            model: a prepared model; the one that ``prepare`` returned when None.
            example_kwargs: keyword inputs of the model.
            keep: paths of layers, or of modules around them, whose output channels stay.

        Raises:
            TypeError: the model is a captured graph, or ``example_inputs`` is no tuple.
            ValueError: a path in ``keep`` names no module, or the example inputs hold no sample.
            RuntimeError: the model is not prepared, a mode is active, its forward raised, or the outputs would differ.
        """
        self._require_idle("shrink()")
        target = self._target(model, "shrink()")
        report = shrink(target, example_inputs, example_kwargs=example_kwargs, keep=keep)
        if not unique_simulators(target, CompressionSimulatorBase):
            self._unmark_model(target)
        return report

    def _complete(self, target: nn.Module) -> None:
        """Tell which weights calibration did not reach."""
        simulators = [(place.name, place.simulator) for place in self._places(target)]
        blind = [name for name, s in simulators if s.input_statistics != "none" and s.input_scale is None]
        if blind:
            warnings.warn(
                f"{', '.join(map(repr, blind))} {'is' if len(blind) == 1 else 'are'} pruned by magnitude: the "
                "pruning_algo looks at inputs, and calibration saw none there. Run data that reaches them through the "
                "model inside calibration_mode() before finalize().",
                BitwrightWarning,
                stacklevel=3,
            )

    def _apply(self, model: nn.Module, places: list[SimulatorPlace[PruneImplBase]], collector: InputCollector) -> None:
        if not collector.statistics:
            warnings.warn(
                "calibration_mode() has nothing to calibrate: no weight has a pruning_algo that looks at inputs.",
                BitwrightWarning,
                stacklevel=5,
            )
            return
        by_impl = collector.statistics
        seen = [(place, by_impl[place.simulator]) for place in places if place.simulator in by_impl]
        for place, statistics in seen:
            statistics.all_reduce(place.original.device)
        if all(statistics.count == 0 for _, statistics in seen):
            raise RuntimeError(
                "calibration_mode saw no inputs of a pruned layer. Run the model on data inside the `with` block."
            )
        broken = [place.name for place, statistics in seen if not statistics.is_finite]
        if broken:
            raise ValueError(
                f"The inputs of {', '.join(map(repr, broken))} had NaN or infinite entries during calibration, or "
                "entries whose squares are too large for float32 (beyond about 1e19), so they say nothing about "
                "importance. Check the data; the model is as it was."
            )
        shared = [place.name for place, _ in seen if is_adjusted(place) and _is_expanded(place.original)]
        if shared:
            raise ValueError(
                f"{', '.join(map(repr, shared))} cannot be adjusted by calibration: several entries share one place in "
                "memory, as in an expanded tensor. Make the weight a copy, nn.Parameter(weight.clone(memory_format="
                "torch.contiguous_format)), before prepare(), or choose pruning_algo='wanda'. The model is as it was."
            )
        calibrate(places, seen, lambda: self._make_masks(model, stacklevel=8))

    @staticmethod
    def _places(model: nn.Module) -> list[SimulatorPlace[PruneImplBase]]:
        return unique_simulators(model, PruneImplBase)

    def _make_masks(self, model: nn.Module, stacklevel: int = 6) -> None:
        """Make all masks that are out of date, those with the scope ``"global"`` together."""
        shared: dict[Any, list[SimulatorPlace[PruneImplBase]]] = defaultdict(list)
        for place in self._places(model):
            impl = place.simulator
            if impl.scope == "global":
                shared[type(impl), impl.pruning_scheme, impl.sparsity].append(place)
            elif impl.is_stale:
                impl.refresh(place.entering())
        for places in shared.values():
            if any(place.simulator.is_stale for place in places):
                _rank_together(places, stacklevel)


def _has_mask(simulator: nn.Module) -> bool:
    return not isinstance(simulator, PruneImplBase) or simulator.mask.numel() > 0


def _groups(state: StateTensor) -> int:
    """Return the groups of the transposed convolutions that read a weight ``[inputs, outputs / groups, ...]``."""
    shape = state.tensor.shape
    for use in (*state.uses, *state.views):
        if use.op.type.startswith("conv_transpose") and use.op.outputs:
            result = use.op.outputs[0].shape
            return int(result[len(result) - len(shape) + 1]) // shape[1]
    return 1


def _is_expanded(weight: torch.Tensor) -> bool:
    """Whether entries of a weight share memory along a dimension."""
    return any(stride == 0 and size > 1 for size, stride in zip(weight.shape, weight.stride(), strict=True))


def _rank_together(places: list[SimulatorPlace[PruneImplBase]], stacklevel: int) -> None:
    """Rank the units of several weights against each other."""
    weights, pooled = [], []
    with torch.no_grad():
        for place in places:
            weights.append(place.entering())
            pooled.append(place.simulator.pruning_scheme.pool(place.simulator.scores(weights[-1])))
        device = pooled[0].device
        kept = keep_largest(torch.cat([part.flatten().to(device) for part in pooled]), places[0].simulator.sparsity)
        parts = torch.split(kept, [part.numel() for part in pooled])
    for place, part, units, weight in zip(places, parts, pooled, weights, strict=True):
        mask = place.simulator.pruning_scheme.spread(part.to(units.device).view(units.shape), weight.shape)
        place.simulator.set_mask(mask, weight)
        if not bool(part.any()) and place.simulator.sparsity < 1.0:
            warnings.warn(
                f"The global ranking removes all of {place.name!r} (shape {tuple(weight.shape)}). Give it "
                "scope='tensor', or a smaller target_sparsity.",
                BitwrightWarning,
                stacklevel=stacklevel,
            )
