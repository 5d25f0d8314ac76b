"""What all compressors share: the model, the configuration, and the mark of a prepared model."""

from __future__ import annotations

import enum
import itertools
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from bitwright.common import ExportBackend
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.errors import BitwrightWarning
from bitwright.planning import Plan

__all__: list[str] = []

_COREAI_OPT_PREPARED_ATTR = "_bitwright_prepared"
_FINALIZED_ATTR = "_bitwright_finalized"


class _Lifecycle(enum.Enum):
    """What a compressor is doing."""

    IDLE = "idle"
    TRAINING = "training"
    CALIBRATING = "calibrating"


_CompressorLifecycle = _Lifecycle
_MODES = {_Lifecycle.TRAINING: "training_mode", _Lifecycle.CALIBRATING: "calibration_mode"}


def _began_here(error: BaseException) -> bool:
    """Whether an exception was raised in this package, not in the block of a ``with`` around the caller's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).split(".")[0] == "bitwright"


class _BaseModelCompressor(ABC):
    """Base class of ``Quantizer``, ``KMeansPalettizer`` and ``MagnitudePruner``.

    Args:
        model: the model to compress.
        config: the compressor's configuration.

    Raises:
        TypeError: ``model`` is no ``nn.Module``, or a TorchScript module.
    """

    _supported_modules: tuple[type[nn.Module], ...] = ()

    def __init__(self, model: nn.Module, config: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__} needs a torch.nn.Module as its model, got {type(model).__name__}: {model!r}."
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                f"{type(self).__name__} cannot compress a TorchScript module ({type(model).__name__}): its weights "
                "cannot be replaced. Compress the nn.Module that it was scripted or traced from."
            )
        self._model = model
        self._config = config
        self._lifecycle = _Lifecycle.IDLE

    @abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Insert simulators into the model."""

    @abstractmethod
    def finalize(
        self,
        model: nn.Module | None = None,
        backend: ExportBackend | str = ExportBackend.CoreAI,
        *args: Any,
        mmap_dir: str | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        """Turn the prepared model into what ``backend`` takes."""

    def calibration_mode(self, model: nn.Module | None = None) -> AbstractContextManager[Any]:
        """Collect statistics inside the ``with`` block.

        Raises:
            NotImplementedError: this compressor has nothing to calibrate.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support calibration_mode.")

    def training_mode(self, model: nn.Module | None = None) -> AbstractContextManager[Any]:
        """Train with simulated compression inside the ``with`` block.

        Raises:
            NotImplementedError: this compressor does not train.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support training_mode.")

    @classmethod
    def supported_modules(cls) -> tuple[type[nn.Module], ...]:
        """Return the module classes whose weights this compressor handles by itself."""
        return cls._supported_modules

    @staticmethod
    def _is_model_prepared(model: nn.Module) -> bool:
        return _COREAI_OPT_PREPARED_ATTR in model._buffers

    @staticmethod
    def _mark_model_as_prepared(model: nn.Module) -> None:
        # A buffer survives deepcopy and the rebuilding of graph modules; non-persistent, it is not in the state_dict.
        held = next(itertools.chain(model.parameters(), model.buffers()), None)
        device = None if held is None or held.is_meta else held.device  # where all other buffers are
        # Not register_buffer: it refuses a name that a wrapper finds in a prepared model inside it.
        model._buffers[_COREAI_OPT_PREPARED_ATTR] = torch.tensor(True, device=device)
        model._non_persistent_buffers_set.add(_COREAI_OPT_PREPARED_ATTR)
        model.__dict__.pop(_FINALIZED_ATTR, None)

    @staticmethod
    def _unmark_model(model: nn.Module) -> None:
        model._buffers.pop(_COREAI_OPT_PREPARED_ATTR, None)
        model._non_persistent_buffers_set.discard(_COREAI_OPT_PREPARED_ATTR)
        model.__dict__[_FINALIZED_ATTR] = True

    @classmethod
    def _is_prepared_by_others(cls, model: nn.Module, is_own: Callable[[CompressionSimulatorBase], bool]) -> bool:
        """Whether the model was prepared, but not with simulators of this technique, so that it may be put on top.

        One that was prepared without finding anything to compress is such a model, too.
        """
        simulators = [module for module in model.modules() if isinstance(module, CompressionSimulatorBase)]
        return cls._is_model_prepared(model) and not any(map(is_own, simulators))

    def _require_prepared(self, model: nn.Module, action: str = "this") -> None:
        if self._is_model_prepared(model):
            return
        if model.__dict__.get(_FINALIZED_ATTR, False):
            raise RuntimeError(
                f"Model must be prepared before {action}, and this one is not any more: finalize() or shrink() has "
                "changed it in place. For a second backend, finalize(copy.deepcopy(prepared), backend=...) before the "
                "model itself; or prepare the float model anew."
            )
        raise RuntimeError(
            f"Model must be prepared before {action}. Model has not been prepared: call "
            f"{type(self).__name__}.prepare(example_inputs) first."
        )

    def _checked_for(
        self,
        target: str | None,
        plan: Plan,
        example_inputs: tuple[Any, ...],
        example_kwargs: Mapping[str, Any] | None,
        dynamic_shapes: Any = None,
    ) -> Plan:
        """Add what a target cannot hold, and operators that it lacks, to the problems of a plan."""
        if target is not None:
            from bitwright.export.capabilities import check_plan
            from bitwright.export.operators import check_operators

            plan.problems.extend(check_plan(plan, target))
            example = target, example_inputs, example_kwargs, dynamic_shapes
            lacking = check_operators(self._model, *example)
            folded = self._folded() if lacking else None
            if folded is None or check_operators(folded, *example):
                plan.problems.extend(lacking)
        return plan

    def _folded(self) -> nn.Module | None:
        """The model without batch norms that are gone before a converter comes; None where there are none."""
        return None

    def _require_idle(self, action: str) -> None:
        if self._lifecycle is not _Lifecycle.IDLE:
            remedy = "leave the `with` block first"
            if self._lifecycle is _Lifecycle.TRAINING:
                remedy += ", or call close() of the QATCallback if an error has ended a trainer's training"
            raise RuntimeError(f"{action} inside {self._lifecycle.value} mode; {remedy}.")

    @contextmanager
    def _in_lifecycle(self, state: _Lifecycle) -> Iterator[None]:
        if self._lifecycle is not _Lifecycle.IDLE:
            raise RuntimeError(
                f"Cannot enter {_MODES[state]}: this {type(self).__name__} is {self._lifecycle.value} already. Nested "
                "modes cannot be: leave the outer `with` block first."
            )
        self._lifecycle = state
        try:
            yield
        except GeneratorExit as end:
            if _began_here(end) and not sys.is_finalizing():
                mode = _MODES[state]
                warnings.warn(
                    f"{mode}() has ended, because what it returned was not kept, and with it the mode goes. Write "
                    f"`with ...{mode}():`, or hold on to the object whose `__enter__` you call.",
                    BitwrightWarning,
                    stacklevel=2,
                )
            raise
        finally:
            self._lifecycle = _Lifecycle.IDLE
