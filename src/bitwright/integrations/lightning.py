"""Quantization-aware training in PyTorch Lightning."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitwright.quantization import Quantizer
from bitwright.quantization._averages import refuse_averaged_buffers

from ._session import TrainingSession

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise ImportError("bitwright.integrations.lightning needs Lightning: pip install lightning") from error

__all__ = ["QATCallback"]


class QATCallback(Callback):  # type: ignore[misc]
    """Keeps a quantizer in training mode during ``trainer.fit``, steps its schedules, and checkpoints its state.

    Schedules advance once per optimizer step, so that gradient accumulation counts as it should. Validation, the sanity
    check before training, test and prediction observe nothing.

    Args:
        quantizer: a quantizer whose model is prepared; the LightningModule computes with that model.

    Raises:
        ValueError: an average of the weights, such as that of ``EMAWeightAveraging``, averages buffers too.

    Example:
        >>> trainer = Trainer(callbacks=[QATCallback(quantizer)])  # doctest: +SKIP
    """

    def __init__(self, quantizer: Quantizer) -> None:
        self._session = TrainingSession(quantizer)
        self._seen_steps = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """See that averages of the weights are no averages of switches and zero points."""
        refuse_averaged_buffers(pl_module, type(pl_module).__name__)
        for callback in trainer.callbacks:
            for value in vars(callback).values():
                if isinstance(value, nn.Module):
                    refuse_averaged_buffers(value, type(callback).__name__)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter training mode."""
        self._seen_steps = trainer.global_step
        self._session.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advance the schedules if the optimizer has stepped."""
        if trainer.global_step > self._seen_steps:
            self._seen_steps = trainer.global_step
            self._session.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop observing, in training as in the sanity check and in ``trainer.validate``."""
        self._session.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Observe again."""
        self._session.resume()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop observing."""
        self._session.pause()

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Observe again, where a loaded checkpoint has observers on."""
        self._session.resume()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop observing."""
        self._session.pause()

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Observe again, where a loaded checkpoint has observers on."""
        self._session.resume()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave training mode."""
        self._session.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Have the switches at rest again: callbacks have copied an average, as it was in training, into the model."""
        self._session.rest()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave training mode, so that the model can be used."""
        self._session.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the quantizer's state for the trainer's checkpoint."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the quantizer's state from the trainer's checkpoint."""
        self._session.load_state_dict(state_dict)
