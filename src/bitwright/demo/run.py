"""Train, quantize, measure."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from bitwright.common import ExportBackend
from bitwright.quantization import Quantizer

from .digits import Digits, load_digits
from .network import DigitsCNN, accuracy, train
from .recipes import RECIPES, Recipe

__all__ = ["DemoResult", "DemoRow", "run_demo"]


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One line of the table; every number was measured in the run.

    Attributes:
        name: recipe.
        accuracy: share of the held-out digits that are recognised.
        bits_per_weight: bits of all parameters and buffers, compressed, divided by their number of elements.
        bytes: the same in bytes.
        sqnr_db: power of the float model's logits over the power of the difference, in dB; None for the float model.
        seconds: time for preparing, calibrating, training and finalizing.
    """

    name: str
    accuracy: float
    bits_per_weight: float
    bytes: int
    sqnr_db: float | None
    seconds: float


@dataclass(slots=True)
class DemoResult:
    """The table, and the versions it was made with."""

    rows: list[DemoRow] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def run_demo(*, epochs: int = 12, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> DemoResult:
    """Train the float network, then make every row of :data:`RECIPES` from it.

    Args:
        epochs: epochs of float training.
        seed: seed of data order and initial weights.
        progress: called with the name of the row that begins.
    """
    from bitwright import __version__

    torch.manual_seed(seed)
    digits = load_digits()
    model = DigitsCNN()
    progress("float32: training")
    start = time.perf_counter()
    train(model.train(), digits, epochs=epochs, learning_rate=5e-3, seed=seed)
    model.eval()
    with torch.no_grad():
        reference = model(digits.test_images)
    elements, size = _dense_size(model)
    seconds = time.perf_counter() - start
    result = DemoResult(versions={"bitwright": __version__, "torch": torch.__version__})
    result.rows.append(
        DemoRow("float32", accuracy(reference, digits.test_labels), 8 * size / elements, size, None, seconds)
    )
    for recipe in RECIPES:
        progress(recipe.name)
        result.rows.append(_make_row(recipe, model, digits, reference, seed))
    return result


def _make_row(recipe: Recipe, model: nn.Module, digits: Digits, reference: torch.Tensor, seed: int) -> DemoRow:
    start = time.perf_counter()
    quantizer = Quantizer(copy.deepcopy(model), recipe.config())
    any_batch = {"images": {0: torch.export.Dim.DYNAMIC}}
    prepared = quantizer.prepare((digits.train_images[:64],), dynamic_shapes=any_batch)
    plan = quantizer.applied_plan
    assert plan is not None
    if recipe.calibrate:
        with quantizer.calibration_mode(), torch.no_grad():
            for images in torch.split(digits.train_images, 64)[:8]:
                prepared(images)
    if recipe.epochs:
        with quantizer.training_mode():
            train(prepared, digits, epochs=recipe.epochs, learning_rate=2e-3, seed=seed)
    finalized = quantizer.finalize(backend=ExportBackend._TORCH)
    seconds = time.perf_counter() - start
    finalized.eval()
    with torch.no_grad():
        logits = finalized(digits.test_images)
    elements, size = _dense_size(model)
    size += plan.compressed_bytes - plan.dense_bytes
    return DemoRow(
        recipe.name,
        accuracy(logits, digits.test_labels),
        8 * size / elements,
        size,
        sqnr_db(reference, logits),
        seconds,
    )


def sqnr_db(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB, in float64."""
    signal = reference.double().square().sum()
    noise = (reference.double() - other.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


def _dense_size(model: nn.Module) -> tuple[int, int]:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)
