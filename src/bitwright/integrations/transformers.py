"""Quantization-aware training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright._utils.files import write_text_atomically
from bitwright.errors import BitwrightWarning
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

    Schedules advance once per optimizer step. Evaluations between steps observe nothing, whoever asks for them, nor do
    ``trainer.evaluate()`` and ``trainer.predict()`` outside of training: observers that a loaded checkpoint has on are
    turned off when the Trainer is made. A callback that evaluates in its own ``on_step_end`` is to come after this one.
    Each checkpoint folder gets ``bitwright_quantizer.json``; resuming from a checkpoint reads it.
    Where training ends with an error or Ctrl-C, ``close()`` leaves training mode.
    The state_dict of a model that the Trainer saves as it is, such as a graph module, or with simulators on tied
    weights, gets copies of what stands in it under several names, which safetensors refuses.

    Args:
        quantizer: a quantizer whose model is prepared and is the trainer's model.
        resume_from: checkpoint folder to take the quantizer's state from when training begins; needed only where
            ``trainer.train(resume_from_checkpoint=...)`` names a folder that is not in ``output_dir``.

    Raises:
        ValueError: the Trainer is told to checkpoint gradients of a model that cannot, such as a graph module; or, when
            training begins, a checkpoint's file with the quantizer's state is cut off.
        FileNotFoundError: ``resume_from`` has no such file when training begins.
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
        """Enter training mode, from the state that a checkpoint has where training is resumed; observe nothing yet."""
        folder = self._resume_from or _resumed_from(args, state)
        if folder is not None:
            self._session.load_state_dict(_state_in(folder))
            self._resume_from = None
        elif state.global_step and self._session.quantizer.has_schedule:
            warnings.warn(
                f"Training goes on at step {state.global_step}, and no checkpoint with {_FILE} was found: the "
                "quantizer's schedules begin at step 0. Pass QATCallback(quantizer, resume_from=folder).",
                BitwrightWarning,
                stacklevel=2,
            )
        self._session.begin()
        self._session.pause()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe what the model is trained with, all parts of a batch."""
        self._session.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the schedules, and observe nothing until the next step: evaluations may come between them."""
        self._session.step()
        self._session.pause()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the quantizer's state beside the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if getattr(state, "is_world_process_zero", True):
            write_text_atomically(folder / _FILE, json.dumps(self._session.state_dict()) + "\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave training mode."""
        self.close()

    def close(self) -> None:
        """Leave training mode, as ``trainer.train()`` does at its end, where an error or Ctrl-C has ended it."""
        self._session.end()


def _state_in(folder: Path) -> dict[str, Any]:
    """Read the quantizer's state from a checkpoint folder."""
    try:
        state: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{str(folder)!r} is no checkpoint with a quantizer's state: it has no {_FILE}, which QATCallback writes "
            "to each checkpoint-N folder. Pass such a folder as resume_from, or leave it out to begin anew."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{str(folder / _FILE)!r} does not hold a quantizer's state: {error}. Resume from another checkpoint."
        ) from error
    return state


def _resumed_from(args: Any, state: Any) -> Path | None:
    """Return the checkpoint that training goes on from, if it has a quantizer's state; the Trainer names its step."""
    if not state.global_step:
        return None
    asked = getattr(args, "resume_from_checkpoint", None)
    folders = [Path(asked)] if isinstance(asked, str) else []
    folders.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")
    return next((folder for folder in folders if (folder / _FILE).is_file()), None)


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
