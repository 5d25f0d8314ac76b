"""Quantization-aware training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.quantization import Quantizer

from ._session import TrainingSession

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("bitwright.integrations.transformers needs transformers: pip install transformers") from error

__all__ = ["QATCallback"]

_FILE = "bitwright_quantizer.json"
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # its name from transformers 5 on, and before


class QATCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a quantizer in training mode during ``trainer.train()``, steps its schedules, and saves its state.

    Schedules advance once per optimizer step. Evaluations between steps observe nothing, nor do ``trainer.evaluate()``
    and ``trainer.predict()`` outside of training: observers that a loaded checkpoint has on are turned off when the
    Trainer is made. Each checkpoint folder gets ``bitwright_quantizer.json``; resuming from a checkpoint reads it.
    The state_dict of a model that the Trainer saves as it is, such as a graph module, or with simulators on tied
    weights, gets copies of what stands in it under several names, which safetensors refuses.

    Args:
        quantizer: a quantizer whose model is prepared and is the trainer's model.
        resume_from: checkpoint folder to take the quantizer's state from when training begins.

    Raises:
        ValueError: the Trainer is told to checkpoint gradients of a model that cannot, such as a graph module.
    """

    def __init__(self, quantizer: Quantizer, resume_from: str | Path | None = None) -> None:
        self._session = TrainingSession(quantizer)
        self._resume_from = None if resume_from is None else Path(resume_from)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """See that the Trainer can train, evaluate and save the model."""
        self._session.stop_observing()
        if model is None:
            return
        asked = [name for name in _CHECKPOINTING if getattr(args, name, False)]
        if asked and not any(hasattr(model, f"{name}_enable") for name in _CHECKPOINTING):
            raise ValueError(
                f"TrainingArguments({asked[0]}=True) needs a model that recomputes its layers, and "
                f"{type(model).__name__} has no {asked[0]}_enable(): the graph of a model has no layers. "
                f"Prepare with execution_mode='eager', or leave {asked[0]} out."
            )
        saves_itself = hasattr(model, "save_pretrained") and not _shares_simulated_weights(model)
        if not saves_itself and _apart not in model._state_dict_hooks.values():
            model.register_state_dict_post_hook(_apart)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Enter training mode, from a saved state where one is given; stop observing if an evaluation is next."""
        if self._resume_from is not None:
            self._session.load_state_dict(json.loads((self._resume_from / _FILE).read_text()))
            self._resume_from = None
        self._session.begin()
        if getattr(args, "eval_on_start", False):
            self._session.pause()

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


def _shares_simulated_weights(model: nn.Module) -> bool:
    """Whether a tied weight has simulators on it, under whose names ``save_pretrained`` does not know it."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen and ".parametrizations." in f".{name}":
            return True
        seen.add(id(parameter))
    return False


def _apart(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put copies in the place of tensors that a state_dict holds already, under another name."""
    held: set[int] = set()
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel():
            if value.untyped_storage().data_ptr() in held:
                state[name] = value.clone()
            held.add(value.untyped_storage().data_ptr())
