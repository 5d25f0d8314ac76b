"""A loss that holds a quantized model to its float original: logits, and the outputs of chosen layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

__all__ = ["DistillationLoss"]


class DistillationLoss(nn.Module):
    """Knowledge distillation from the float model (Hinton et al., arXiv 1503.02531) into its quantized copy.

    ``loss = temperature**2 * KL(teacher || student) + sum(weight * relative squared error of a layer's output)``.

    The teacher runs in eval mode without gradients, on the inputs that the student last saw. It is not a submodule:
    neither optimizers nor checkpoints see it.

    Args:
        student: the prepared model.
        teacher: the float model.
        temperature: softens both distributions; positive.
        layers: names of modules whose outputs are compared, or a mapping of them to weights; in the student and in the
            teacher. A graph-mode student has no such modules: use the logits there.
        logits: picks the logits, classes along the last dimension, out of what a model returns; None for the output
            itself, its ``logits``, or its first entry, of a mapping too.

    Raises:
        ValueError: the temperature is not positive, or a layer is in neither or only one of the models.

    Example:
        >>> teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        >>> student = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        >>> loss = DistillationLoss(student, teacher, layers=["0"])
        >>> x = torch.randn(2, 4)
        >>> loss(student(x), x).shape
        torch.Size([])
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        *,
        temperature: float = 1.0,
        layers: Sequence[str] | Mapping[str, float] = (),
        logits: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature!r}.")
        self.temperature = temperature
        self.layers = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers, 1.0)
        self._logits = _find_logits if logits is None else logits
        self._seen: dict[str, torch.Tensor] = {}
        self._wanted: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        stores = ((student, self._seen), (teacher, self._wanted))
        found = [(dict(model.named_modules()), store) for model, store in stores]
        for modules, _ in found:
            missing = [name for name in self.layers if name not in modules]
            if missing:
                raise ValueError(
                    f"layers {missing} are not modules of the {type(modules['']).__name__}; see its named_modules()."
                )
        self._teacher = [teacher.eval()]
        for modules, store in found:
            for name in self.layers:
                self._handles.append(modules[name].register_forward_hook(_Keep(store, name)))

    def forward(self, output: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the student's latest output.

        Args:
            output: what the student returned.
            *args: the inputs that it returned it for.
            **kwargs: likewise.

        Raises:
            RuntimeError: a layer was not called since the last loss.
        """
        teacher = self._teacher[0]
        with torch.no_grad():
            wanted = self._logits(teacher(*args, **kwargs)).float()
        soft = self._logits(output).float() / self.temperature
        target = F.log_softmax(wanted / self.temperature, -1)
        divergence = F.kl_div(F.log_softmax(soft, -1), target, reduction="none", log_target=True).sum(-1).mean()
        loss = self.temperature**2 * divergence
        missing = [name for name in self.layers if name not in self._seen or name not in self._wanted]
        if missing:
            raise RuntimeError(
                f"layers {missing} have given no output since the last loss. Call the student once before each loss; "
                "layers that its forward, or the teacher's, does not call cannot be compared."
            )
        for name, weight in self.layers.items():
            reference = self._wanted[name].float()
            error = (self._seen[name].float() - reference).square().sum()
            loss = loss + weight * error / reference.square().sum().clamp(min=torch.finfo(torch.float32).eps)
        self._seen.clear()
        self._wanted.clear()
        return loss

    def close(self) -> None:
        """Take the hooks off both models."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Keep:
    def __init__(self, store: dict[str, torch.Tensor], name: str) -> None:
        self.store, self.name = store, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.store[self.name] = _first(output)


def _find_logits(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping) and "logits" in output:
        return _first(output["logits"])
    return _first(getattr(output, "logits", output))


def _first(output: Any) -> torch.Tensor:
    """Return a tensor, or the first entry of a sequence or mapping of them.

    Raises:
        TypeError: there is no tensor.
    """
    found = output
    if isinstance(output, Mapping | Sequence) and len(output):
        found = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"Expected a tensor, or a mapping or sequence that begins with one, got {type(output).__name__}; pass "
            "logits=... to pick the logits out of what the models return, and name layers that return tensors."
        )
    return found
