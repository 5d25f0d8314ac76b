"""Train, quantize, measure."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from bitwright.inspection import bits_per_weight

from .digits import Digits, load_digits
from .network import DigitsCNN, accuracy, train
from .recipes import RECIPES

__all__ = ["DemoResult", "DemoRow", "run_demo", "sqnr_db"]


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One line of the table; every number was measured in the run.

    Attributes:
        name: recipe.
        accuracy: share of the held-out digits that are recognised.
        bits_per_weight: packed bits of all parameters and buffers, divided by their number of elements.
        bytes: the packed bytes.
        sqnr_db: power of the float model's logits over the power of the difference, in dB; None for the float model,
            and where the two are equal bit for bit.
        seconds: time for preparing, calibrating, training and finalizing.
        equal: whether the logits are the float model's bit for bit; None for the float model.
    """

    name: str
    accuracy: float
    bits_per_weight: float
    bytes: int
    sqnr_db: float | None
    seconds: float
    equal: bool | None = None


@dataclass(slots=True)
class DemoResult:
    """The table, and the versions it was made with."""

    rows: list[DemoRow] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")


def run_demo(*, epochs: int = 10, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> DemoResult:
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
    seconds = time.perf_counter() - start
    with torch.no_grad():
        reference = model(digits.test_images)
    result = DemoResult(versions={"bitwright": __version__, "torch": torch.__version__})
    result.rows.append(_row("float32", model, digits, None, seconds))
    for recipe in RECIPES:
        progress(recipe.name)
        start = time.perf_counter()
        finalized = recipe.compress(copy.deepcopy(model), digits, seed)
        seconds = time.perf_counter() - start
        result.rows.append(_row(recipe.name, finalized, digits, reference, seconds))
    return result


def _row(name: str, model: nn.Module, digits: Digits, reference: torch.Tensor | None, seconds: float) -> DemoRow:
    model.eval()
    with torch.no_grad():
        logits = model(digits.test_images)
    size = bits_per_weight(model)
    found = None if reference is None else sqnr_db(reference, logits)
    return DemoRow(
        name=name,
        accuracy=accuracy(logits, digits.test_labels),
        bits_per_weight=size.bpw,
        bytes=size.total_bits // 8,
        sqnr_db=found if found is not None and math.isfinite(found) else None,
        seconds=seconds,
        equal=None if found is None else found == math.inf,
    )


def sqnr_db(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB, in float64; infinite for equal tensors."""
    signal = reference.double().square().sum()
    noise = (reference.double() - other.double()).square().sum()
    return float(10 * torch.log10(signal / noise))
