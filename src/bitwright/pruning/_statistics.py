"""What calibration learns about the inputs of a layer. Statistics merge: over batches, uses and processes."""

from __future__ import annotations

import torch

from ._matrix_form import LayerInputs, MatrixForm

__all__ = ["GramStatistics", "NormStatistics"]


class NormStatistics:
    """Sum of squares of each input column.

    Attributes:
        form: how the weight is read.
        count: positions seen.
        squares: float32 ``[G, C]``; None before the first inputs.
    """

    def __init__(self) -> None:
        self.form: MatrixForm | None = None
        self.count = 0
        self.squares: torch.Tensor | None = None

    def add(self, inputs: LayerInputs) -> None:
        """Take in the inputs of one call."""
        self._take(inputs.form, inputs.columns.shape[1], inputs.columns.float().square().sum(1))

    def merge(self, other: NormStatistics) -> None:
        """Take in what another object has seen."""
        if other.squares is not None and other.form is not None:
            self._take(other.form, other.count, other.squares)

    def all_reduce(self) -> None:
        """Merge over all processes of ``torch.distributed``, if it runs."""
        if self.squares is not None and _is_distributed():
            counts = torch.tensor(float(self.count), device=self.squares.device)
            torch.distributed.all_reduce(self.squares)
            torch.distributed.all_reduce(counts)
            self.count = int(counts)

    def _take(self, form: MatrixForm, count: int, squares: torch.Tensor) -> None:
        if self.squares is None:
            self.form, self.squares = form, squares.clone()
        elif form == self.form and squares.shape == self.squares.shape:
            self.squares += squares
        else:  # two ops read the weight in different ways; the first one counts
            return
        self.count += count

    @property
    def is_finite(self) -> bool:
        """Whether all inputs so far were finite."""
        return self.squares is None or bool(torch.isfinite(self.squares).all())

    @property
    def scale(self) -> torch.Tensor:
        """Root of the mean square of each column, float32 ``[G, C]``."""
        assert self.squares is not None
        return (self.squares / max(self.count, 1)).sqrt()


class GramStatistics(NormStatistics):
    """Gram matrix Σ x xᵀ of the input columns.

    Attributes:
        squares: float32 ``[G, C, C]``; None before the first inputs.
    """

    def add(self, inputs: LayerInputs) -> None:
        """Take in the inputs of one call."""
        columns = inputs.columns.float()
        self._take(inputs.form, columns.shape[1], columns.transpose(1, 2) @ columns)

    @property
    def gram(self) -> torch.Tensor:
        """Mean of x xᵀ, float32 ``[G, C, C]``."""
        assert self.squares is not None
        return self.squares / max(self.count, 1)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
