"""What compression did to the model's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ._probe import float_tensors
from .metrics import MASKED, PIECE, ErrorAccumulator, parts_of
from .report import EndToEnd

__all__ = ["OutputStatistics"]


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
        if all(tensors) and tensors[0][0].ndim and tensors[0][0].shape[-1] > 1:
            self._add_rows(tensors[0][0].detach(), tensors[1][0].detach())
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


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
