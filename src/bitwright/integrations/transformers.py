"""Quantization-aware training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitwright.quantization import Quantizer

from ._session import TrainingSession

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("bitwright.integrations.transformers needs transformers: pip install transformers") from error

__all__ = ["QATCallback"]

_FILE = "bitwright_quantizer.json"


class QATCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a quantizer in training mode during ``trainer.train()``, steps its schedules, and saves its state.

    Schedules advance once per optimizer step. Evaluations between steps observe nothing. Each checkpoint folder gets
    ``bitwright_quantizer.json``; resuming from a checkpoint reads it.

    Args:
        quantizer: a quantizer whose model is prepared and is the trainer's model.
        resume_from: checkpoint folder to take the quantizer's state from when training begins.
    """

    def __init__(self, quantizer: Quantizer, resume_from: str | Path | None = None) -> None:
        self._session = TrainingSession(quantizer)
        self._resume_from = None if resume_from is None else Path(resume_from)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Enter training mode, from a saved state where one is given."""
        if self._resume_from is not None:
            self._session.load_state_dict(json.loads((self._resume_from / _FILE).read_text()))
            self._resume_from = None
        self._session.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the schedules; stop observing if an evaluation is next."""
        self._session.step()
        self._pause_for(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing if an evaluation is next."""
        self._pause_for(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe again."""
        self._session.resume()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe again, also when the announced evaluation did not come."""
        self._session.resume()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the quantizer's state beside the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if getattr(state, "is_world_process_zero", True):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _FILE).write_text(json.dumps(self._session.state_dict()) + "\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave training mode."""
        self._session.end()

    def _pause_for(self, control: Any) -> None:
        if control.should_evaluate:
            self._session.pause()
