"""What compression did to the model's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ._probe import float_tensors, measured_tensors
from .metrics import MASKED, PIECE, ErrorAccumulator, parts_of
from .report import EndToEnd

__all__ = ["OutputStatistics"]

_NO_NUMBERS = (
    "The output holds no floating-point tensor, so that nothing was measured at the output. Does forward return "
    "integers, or an object of another class than tuples, lists, mappings and data classes?"
)


class OutputStatistics:
    """Adds up what outputs show.

    Args:
        metric: the user's metric, or None.
    """

    def __init__(self, metric: Callable[[Any, Any], float] | None = None) -> None:
        self.metric = metric
        self.error = ErrorAccumulator()
        self.rows = 0
        self.measured_rows = 0
        self.divergence = 0.0
        self.agreeing = 0
        self.scores: tuple[list[float], list[float]] = ([], [])

    def add(self, reference: Any, compressed: Any, batch: Any) -> None:
        """Add the outputs of both models for a batch.

        Raises:
            ValueError: a tensor has another shape than before, or the metric is not finite.
        """
        tensors = float_tensors(reference), float_tensors(compressed)
        for expected, found in zip(*tensors, strict=False):
            try:
                self.error.update(expected, found)
            except ValueError as error:
                raise ValueError(f"The model's output: {error}. Are these two forms of the same model?") from error
        rows = [tensor for output in (reference, compressed) if (tensor := _scores_of(output)) is not None]
        if len(rows) == 2:
            self._add_rows(*rows)
        if self.metric is not None:
            number = len(self.scores[0]) + 1
            for scores, output, model in zip(
                self.scores, (reference, compressed), ("float", "compressed"), strict=True
            ):
                score = float(self.metric(output, batch))
                if not math.isfinite(score):
                    raise ValueError(
                        f"The metric returned {score} for the {model} model's output on batch {number}; it must return "
                        "a finite number."
                    )
                scores.append(score)

    def result(self) -> EndToEnd:
        """Return the averages."""
        rows = self.rows
        return EndToEnd(
            error=self.error.result(),
            kl_divergence=self.divergence / self.measured_rows if self.measured_rows else None,
            top1_agreement=self.agreeing / rows if rows else None,
            metric_float=_mean(self.scores[0]),
            metric_compressed=_mean(self.scores[1]),
        )

    def notes(self) -> list[str]:
        """Return what could not be measured."""
        return [] if self.error.batches else [_NO_NUMBERS]

    def _add_rows(self, reference: torch.Tensor, compressed: torch.Tensor) -> None:
        classes = reference.shape[-1]
        pairs = (parts_of(scores.reshape(-1, classes), PIECE // classes) for scores in (reference, compressed))
        for first, second in zip(*pairs, strict=True):
            self._add_scores(first.double(), second.double())

    def _add_scores(self, first: torch.Tensor, second: torch.Tensor) -> None:
        second = torch.nan_to_num(second).clamp(-MASKED, MASKED)
        # classes that are masked with -inf have probability 0 and add nothing
        divergences = F.kl_div(second.log_softmax(-1), first.softmax(-1), reduction="none").sum(-1)
        divergences = divergences[torch.isfinite(divergences)]
        self.divergence += max(0.0, float(divergences.sum()))
        self.measured_rows += len(divergences)
        self.rows += len(first)
        self.agreeing += int((first.argmax(-1) == second.argmax(-1)).sum())


def _scores_of(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of an output, if its rows may be scores of several classes."""
    first = next((tensor for tensor in measured_tensors(output) if tensor.is_floating_point()), None)
    return first.detach() if first is not None and first.ndim and first.shape[-1] > 1 else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
