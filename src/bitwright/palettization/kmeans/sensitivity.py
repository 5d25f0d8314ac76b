"""How much the loss depends on each weight: statistics of squared gradients, and their files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bitwright._utils.files import new_file_atomically
from bitwright._utils.tensor_files import write_tensors

__all__ = ["CalibrationHelper", "SensitivityStatistics", "load_sensitivities", "save_sensitivities"]

_SCALE = 100.0
_SMALLEST = 1e-12
_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})


class SensitivityStatistics:
    """Sums of squared batch gradients, an estimate of the diagonal of the Fisher information.

    That is the importance of each weight in SqueezeLLM (Kim et al., arXiv 2306.07629, section 4.1). Statistics add up,
    so data may be split over batches, runs and processes.

    Attributes:
        steps: batches seen.
        sums: by parameter name, the sum of squared gradients, float32 in the parameter's shape.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take in the gradients of one batch, dense or sparse."""
        for name, gradient in gradients:
            square = gradient.detach().float().to_dense().square()
            if name in self.sums:
                self.sums[name] += square
            else:
                self.sums[name] = square
        self.steps += 1

    def merge(self, other: SensitivityStatistics) -> None:
        """Take in what another object has seen.

        Raises:
            ValueError: a parameter has another shape there.
        """
        for name, total in other.sums.items():
            own = self.sums.get(name)
            if own is not None and own.shape != total.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(own.shape)} here and {tuple(total.shape)} there; merge statistics of "
                    "one model only."
                )
            self.sums[name] = total.clone() if own is None else own + total.to(own.device)
        self.steps += other.steps

    def all_reduce(self, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Merge over all processes of ``torch.distributed``, if it runs.

        Args:
            parameters: all parameters that any process may have seen gradients of, by name and the same everywhere;
                None if every process has seen the same ones.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        unseen = {name: p for name, p in (parameters or {}).items() if name not in self.sums}
        self.sums |= {name: torch.zeros_like(p, dtype=torch.float32).detach() for name, p in unseen.items()}
        for name in sorted(self.sums):
            torch.distributed.all_reduce(self.sums[name])
        for name in unseen:
            if not bool(self.sums[name].any()):
                del self.sums[name]
        device = next((p.device for p in (parameters or self.sums).values()), torch.device("cpu"))
        steps = torch.tensor(self.steps, device=device)
        torch.distributed.all_reduce(steps)
        self.steps = int(steps)

    def sensitivities(self) -> dict[str, torch.Tensor]:
        """Return the importance of each entry in (0, 1], by parameter name.

        Raises:
            ValueError: a gradient was not finite; names the parameters.
        """
        broken = [name for name, total in self.sums.items() if not bool(torch.isfinite(total).all())]
        if broken:
            raise ValueError(
                f"The gradients of {', '.join(map(repr, broken))} are not finite, so they say nothing about "
                "importance. Check the loss and the data."
            )
        return {name: _normalized(total) for name, total in self.sums.items()}

    def save(self, path: str | Path) -> None:
        """Write the sums to a safetensors file, from which runs on other parts of the data can go on."""
        tensors = {name: total.contiguous().cpu() for name, total in self.sums.items()}
        with new_file_atomically(path) as beside:
            write_tensors(tensors, beside, {"steps": str(self.steps)})

    @classmethod
    def load(cls, path: str | Path) -> SensitivityStatistics:
        """Read what :meth:`save` wrote."""
        from safetensors import safe_open

        statistics = cls()
        with safe_open(str(path), framework="pt") as file:
            statistics.steps = int((file.metadata() or {}).get("steps", 0))
            statistics.sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return statistics


def _normalized(total: torch.Tensor) -> torch.Tensor:
    """Divide by the largest; zeros become the smallest that is not zero."""
    peak = float(total.max())
    if peak == 0.0:
        return torch.ones_like(total)
    room = 1.0 if peak < torch.finfo(total.dtype).max / _SCALE else 2.0**-7  # a power of two changes no digit
    scaled = total * room * _SCALE
    scaled = scaled / scaled.max()
    least = torch.where(scaled > 0, scaled, torch.inf).min()
    return torch.where(scaled > 0, scaled, least).clamp_min(_SMALLEST)


class CalibrationHelper:
    """What ``KMeansPalettizer.calibration_mode`` hands out.

    Attributes:
        statistics: what was seen so far.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], loss_fn: Callable[..., torch.Tensor]) -> None:
        if not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function of output and target, got {type(loss_fn).__name__}: {loss_fn!r}."
            )
        self.statistics = SensitivityStatistics()
        self._parameters = parameters
        self._loss_fn = loss_fn

    def step(self, output: Any, target: Any) -> torch.Tensor:
        """Take in one batch and return its loss.

        Args:
            output: what the model made of the batch, with gradients.
            target: what the loss compares it with.

        Raises:
            TypeError: the loss is no tensor.
            RuntimeError: it does not depend on the model's parameters by gradients.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        loss = self._loss_fn(output, target)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}: {loss!r}.")
        if not loss.requires_grad:
            raise RuntimeError(
                "The loss has no gradient. Compute the output in the `with` block, without no_grad, and let loss_fn "
                "use operations that have gradients: no detach(), item(), argmax() or NumPy."
            )
        (loss if loss.ndim == 0 else loss.sum()).backward()  # type: ignore[no-untyped-call]
        self.statistics.add(
            (name, parameter.grad) for name, parameter in self._parameters.items() if parameter.grad is not None
        )
        return loss.detach()


def save_sensitivities(sensitivities: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Write sensitivities by parameter name: as safetensors, or for ``.pt`` and the like by ``torch.save``."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in sensitivities.items()}
    with new_file_atomically(path) as beside:
        if Path(path).suffix in _TORCH_SUFFIXES:
            content = io.BytesIO()  # torch's writer ends the process where the disk is full
            torch.save(tensors, content)
            Path(beside).write_bytes(content.getbuffer())
        else:
            write_tensors(tensors, beside)


def load_sensitivities(path: str | Path) -> dict[str, torch.Tensor]:
    """Read sensitivities from safetensors or from what ``torch.save`` wrote (tensors only, no code is run).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds anything but tensors by name.
    """
    if Path(path).suffix not in _TORCH_SUFFIXES:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(str(path)))
        except SafetensorError as error:
            if not _is_torch_file(path):
                raise ValueError(f"{str(path)!r} is no safetensors file: {error}") from error
    try:
        loaded = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # torch lets through whatever the bytes of another format lead to
        raise ValueError(f"{str(path)!r} is no file of torch.save that holds tensors only: {error!r}") from error
    if not isinstance(loaded, dict) or not all(isinstance(entry, torch.Tensor) for entry in loaded.values()):
        raise ValueError(f"{str(path)!r} does not hold sensitivities: expected tensors by parameter name.")
    return loaded


def _is_torch_file(path: str | Path) -> bool:
    """A file of ``torch.save`` is a zip archive."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"
