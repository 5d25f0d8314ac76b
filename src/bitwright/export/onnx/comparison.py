"""The codes of an ONNX file beside those of the prepared model, quantizer by quantizer.

A sum that lies on the bound between two codes gets the one or the other from its last bits, and every layer behind
sees that. So the outputs of a deep network say little about a file. Here every quantizer of the model is given what the
file's own codes make of its input, so that each stands for itself, and once more in float64: that tells which of file
and model rounds as exact sums would, and how large an error explains the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from bitwright.artifact import CompressedTensor
from bitwright.export.coreai_activations import activation_operands
from bitwright.export.devices import all_on_cpu
from bitwright.export.lowering import lower
from bitwright.program.aten_names import is_in_place
from bitwright.program.protect import preserved_state
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .runtime import run_with_codes

__all__ = ["CodeComparison", "CodeReport", "compare_codes"]


@dataclass(frozen=True, slots=True)
class CodeComparison:
    """Codes of one activation.

    Attributes:
        activation: its name.
        codes: how many there are.
        differing: those that are not the prepared model's for the same codes at its inputs.
        file_inexact: codes of the file that are not those of exact sums.
        model_inexact: codes of the prepared model that are not those of exact sums.
        file_error: the smallest error of a sum, in steps between two codes, that explains all of ``file_inexact``.
        model_error: the same for ``model_inexact``.
    """

    activation: str
    codes: int
    differing: int
    file_inexact: int
    model_inexact: int
    file_error: float
    model_error: float


@dataclass(frozen=True, slots=True)
class CodeReport:
    """What :func:`compare_codes` found.

    Attributes:
        rows: one for each quantizer in the file, in the order of the model.
    """

    rows: tuple[CodeComparison, ...]

    @property
    def codes(self) -> int:
        """How many codes were compared."""
        return sum(row.codes for row in self.rows)

    @property
    def differing(self) -> int:
        """How many are not the prepared model's for the same codes at their inputs."""
        return sum(row.differing for row in self.rows)

    @property
    def file_error(self) -> float:
        """The smallest error of a sum, in steps, that explains every code of the file."""
        return max((row.file_error for row in self.rows), default=0.0)

    @property
    def model_error(self) -> float:
        """The smallest error of a sum, in steps, that explains every code of the prepared model."""
        return max((row.model_error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        file, model = (sum(getattr(row, f"{who}_inexact") for row in self.rows) for who in ("file", "model"))
        return (
            f"{self.differing} of {self.codes:,} codes beside PyTorch's for the same inputs; exact sums would give "
            f"{file} others than the file (errors up to {self.file_error:.1g} of a step) and {model} others than "
            f"PyTorch ({self.model_error:.1g})"
        )


def compare_codes(
    model: nn.Module,
    path: str | Path,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> CodeReport:
    """Run an ONNX file, and compare the integer codes of its activations with the prepared model's.

    Args:
        model: the prepared model that the file was written from; not changed. Batch norms are folded in it as in files.
        path: the file, from :func:`~bitwright.export.onnx.export_onnx`.
        inputs: positional inputs.
        kwargs: keyword inputs: tensors by the names of the graph's inputs; what else there is, only the model gets.

    Returns:
        One row for each use of a quantizer to integers with one scale. Others (dynamic, per channel, floating point)
        are simulated; a code that the file rounds otherwise there shows in the rows behind. Layers in half precision
        stay so where sums are otherwise exact.

    Raises:
        MissingExtraError: the onnx extra is not installed.
        ConversionError: ONNX Runtime cannot run the file.
        ValueError: the file was written from another model.
    """
    model, inputs, kwargs = all_on_cpu(model, inputs, kwargs)
    feed = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    codes = run_with_codes(path, tuple(feed), named)
    stand_ins: list[_Replayed] = []

    def replay(name: str, simulator: FakeQuantizeImplBase) -> nn.Module:
        stand_ins.append(_Replayed(name, simulator, codes.pop(name, [])))
        return stand_ins[-1]

    twin = lower(model, _Decoded, replay).model
    if codes:
        raise ValueError(f"The model has no activations {sorted(codes)}; {str(path)!r} was written from another one.")
    with preserved_state(twin, stand_ins):  # it shares its buffers with the model
        twin(*inputs, **kwargs)
    for stand_in in stand_ins:
        stand_in.start_exact_run()
    with preserved_state(twin, stand_ins), _exact_sums():
        twin(*inputs, **kwargs)
    return CodeReport(tuple(row for stand_in in stand_ins for row in stand_in.rows))


class _Decoded(nn.Module):
    """Stands for a weight: decodes it once."""

    def __init__(self, _: str, tensor: CompressedTensor[Any]) -> None:
        super().__init__()
        self.value = tensor.decode()

    def forward(self, _: torch.Tensor | None = None) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a quantizer in float32: its input, which use of it in the file that is, and what it returned."""

    x: torch.Tensor
    use: int | None
    result: torch.Tensor


class _Replayed(nn.Module):
    """Stands for a quantizer: looks at its input, and returns what the file's codes stand for.

    What has no codes in the file (no integers, or nothing reads it) is simulated once, also for exact sums.

    Args:
        name: of the activation.
        simulator: the quantizer.
        found: codes, scale and zero point of every use of it in the file, in order.
    """

    def __init__(
        self, name: str, simulator: FakeQuantizeImplBase, found: list[tuple[torch.Tensor, float, int]]
    ) -> None:
        super().__init__()
        self._name, self._simulator, self._found = name, simulator, found
        self._minval, self._limits = 0.0, {}
        if found:
            operands = activation_operands(simulator)
            self._minval = 0.0 if operands.minval is None else float(operands.minval)
            limits = {"min": operands.low, "max": operands.high}
            self._limits = {name: float(limit) for name, limit in limits.items() if limit is not None}
        self._calls: list[_Call] = []
        self._before: Iterator[_Call] | None = None
        self.rows: list[CodeComparison] = []

    def start_exact_run(self) -> None:
        """Take what follows for the same calls once more, with exact sums."""
        self._before = iter(self._calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if self._before is not None:
                call = next(self._before)
                if call.use is not None:
                    self._compare(x, call)
                return call.result.to(x.dtype)
            use = self._use_in_file(x)
            result = self._simulator(x) if use is None else self._in_file(use).reshape(x.shape)
            self._calls.append(_Call(x.clone(), use, result))
            return result.to(x.dtype, copy=True)  # operators that work in place may follow

    def _use_in_file(self, x: torch.Tensor) -> int | None:
        """Which use of the quantizer in the file this call is; calls with one input are one use there."""
        for call in self._calls:
            if call.x.shape == x.shape and torch.equal(call.x, x):
                return call.use
        start = 1 + max((call.use for call in self._calls if call.use is not None), default=-1)
        uses = range(start, len(self._found))
        use = next((use for use in uses if self._found[use][0].numel() == x.numel()), None)
        if use is None:
            return None
        # The file has no use of what quantizes codes to the same codes.
        joined = torch.equal(self._simulator(x), x) and not torch.equal(self._in_file(use).reshape(x.shape), x.float())
        return None if joined else use

    def _in_file(self, use: int) -> torch.Tensor:
        """What the codes of a use stand for, in float32."""
        codes, scale, zero_point = self._found[use]
        values = (codes.float() - zero_point) * torch.tensor(scale, dtype=torch.float32)
        return values + self._minval if self._minval else values

    def _places(self, x: torch.Tensor, use: int) -> torch.Tensor:
        """Values as places on the scale of codes, not rounded."""
        codes, scale, zero_point = self._found[use]
        bounds = torch.iinfo(codes.dtype)
        x = x.double().reshape(-1)
        if self._limits:
            x = x.clamp(**self._limits)
        return ((x - self._minval) / scale + zero_point).clamp(bounds.min, bounds.max)

    def _compare(self, x: torch.Tensor, call: _Call) -> None:
        assert call.use is not None
        exact = self._places(x, call.use)
        file = self._found[call.use][0].reshape(-1).double()
        model = self._places(self._simulator(call.x.float()), call.use).round()
        nearest = exact.round()
        errors = [float(((exact - codes).abs() - 0.5).clamp(min=0).max()) for codes in (file, model)]
        counts = [int((one != other).sum()) for one, other in ((file, model), (file, nearest), (model, nearest))]
        self.rows.append(CodeComparison(self._name, len(file), *counts, *errors))


class _InFloat64(TorchFunctionMode):
    """Computes in float64 what would be computed in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(getattr(func, "__name__", "")).split(".")[0]
        rest = tree_map(_widened, (args, kwargs or {}))
        if is_in_place(name) or name == "__set__":
            return func(*args[:1], *rest[0][1:], **rest[1])
        return tree_map(_widened, func(*rest[0], **rest[1]))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _exact_sums() -> Iterator[None]:
    default = torch.get_default_dtype()
    if default == torch.float32:
        torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(default)
