"""Training mode that begins and ends in callbacks, not in a ``with`` block."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from bitwright.base_model_compressor import _Lifecycle
from bitwright.quantization import Quantizer
from bitwright.quantization._schedule import observers_off, rest
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["TrainingSession"]


class TrainingSession:
    """Holds a quantizer in training mode between ``begin`` and ``end``.

    Args:
        quantizer: a quantizer whose model is prepared.
        model: the prepared model that is trained, None for the one that ``prepare`` returned.
    """

    def __init__(self, quantizer: Quantizer, model: nn.Module | None = None) -> None:
        self.quantizer = quantizer
        self.model = model
        self._training = ExitStack()
        self._evaluation = ExitStack()
        self.active = False

    def begin(self) -> None:
        """Enter training mode, unless it is entered."""
        if not self.active:
            self.resume()
            self._training.enter_context(self.quantizer.training_mode(self.model))
            self.active = True

    def end(self) -> None:
        """Leave training mode."""
        self.resume()
        self._training.close()
        self.active = False

    def pause(self) -> None:
        """Stop observing for an evaluation, also outside of training mode; in a calibration that is no evaluation."""
        if not self.paused and self.quantizer._lifecycle is not _Lifecycle.CALIBRATING:
            self._evaluation.enter_context(observers_off(self._trained))

    def resume(self) -> None:
        """Observe again."""
        self._evaluation.close()

    def stop_observing(self) -> None:
        """Turn observers off, as a loaded checkpoint may have them on; not inside a mode, which owns them."""
        if self.quantizer._lifecycle is _Lifecycle.IDLE:
            for module in self._trained.modules():
                if isinstance(module, FakeQuantizeImplBase):
                    module.disable_observer()

    def rest(self) -> None:
        """Have the switches as training mode leaves them, when others have written to the model since."""
        if self.quantizer._lifecycle is _Lifecycle.IDLE:
            rest(self._trained)

    @property
    def paused(self) -> bool:
        """Whether an evaluation is under way."""
        return bool(self._evaluation._exit_callbacks)  # type: ignore[attr-defined]

    @property
    def _trained(self) -> nn.Module:
        return self.quantizer._model if self.model is None else self.model

    def step(self) -> None:
        """Advance the schedules, if the config has any."""
        if self.active and self.quantizer.has_schedule:
            self.quantizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the quantizer's state."""
        return self.quantizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the quantizer's state, also in the middle of training mode."""
        active = self.active
        if active:
            self.end()
        self.quantizer.load_state_dict(state)
        if active:
            self.begin()
