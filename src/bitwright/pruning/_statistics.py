"""What calibration learns about the inputs of a layer. Statistics merge: over batches, uses and processes."""

from __future__ import annotations

import operator

import torch

from bitwright._utils.full_precision import full_precision

from ._matrix_form import LayerInputs, MatrixForm

__all__ = ["GramStatistics", "NormStatistics"]


class NormStatistics:
    """Sum of squares of each input column.

    Attributes:
        form: how the weight is read.
        counts: positions seen by each group; empty before the first inputs.
        squares: float32 ``[G, C]``; None before the first inputs.
    """

    def __init__(self) -> None:
        self.form: MatrixForm | None = None
        self.counts: tuple[int, ...] = ()
        self.squares: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Positions seen, by the group that has seen the most."""
        return max(self.counts, default=0)

    def add(self, inputs: LayerInputs) -> None:
        """Take in the inputs of one call."""
        self._take(inputs.form, inputs.counts, inputs.columns.float().square().sum(1))

    def merge(self, other: NormStatistics) -> None:
        """Take in what another object has seen."""
        if other.squares is not None and other.form is not None:
            self._take(other.form, other.counts, other.squares)

    def all_reduce(self, device: torch.device | None = None) -> None:
        """Merge over all processes of ``torch.distributed``, if it runs; some may have seen nothing.

        Args:
            device: where the weight is; that of the statistics when None.
        """
        if not _is_distributed():
            return
        if self.squares is not None:
            device = self.squares.device
        own = [0] * 4
        if self.form is not None and self.squares is not None:
            own = [int(self.form.transposed), self.form.groups, *self.squares.shape[:2]]
        common = torch.tensor(own, device=device)
        torch.distributed.all_reduce(common, torch.distributed.ReduceOp.MAX)
        transposed, *sizes = common.tolist()
        if not any(sizes):
            return
        if own != [transposed, *sizes]:  # nothing, or inputs that the weight is read with in another way
            self.form = MatrixForm(bool(transposed), sizes[0])
            self.squares = self._zeros(sizes[1], sizes[2], device)
            self.counts = (0,) * sizes[1]
        assert self.squares is not None
        counts = torch.tensor(self.counts, device=device)
        torch.distributed.all_reduce(self.squares)
        torch.distributed.all_reduce(counts)
        self.counts = tuple(counts.tolist())
        if self.count == 0:
            self.form = self.squares = None

    @staticmethod
    def _zeros(groups: int, columns: int, device: torch.device | None) -> torch.Tensor:
        return torch.zeros(groups, columns, dtype=torch.float32, device=device)

    def _take(self, form: MatrixForm, counts: tuple[int, ...], squares: torch.Tensor) -> None:
        if self.squares is None:
            self.form, self.squares, self.counts = form, squares.clone(), counts
        elif form == self.form and squares.shape == self.squares.shape:
            self.squares += squares
            self.counts = tuple(map(operator.add, self.counts, counts))
        # Where two ops read the weight in different ways, the first one counts.

    @property
    def is_finite(self) -> bool:
        """Whether all inputs so far were finite, and small enough for the sum of their squares to be."""
        return self.squares is None or bool(torch.isfinite(self.squares).all())

    @property
    def scale(self) -> torch.Tensor:
        """Root of the mean square of each column, float32 ``[G, C]``."""
        return self._mean().sqrt()

    def _mean(self) -> torch.Tensor:
        """Return the sums divided by the positions of each group."""
        assert self.squares is not None
        counts = torch.tensor(self.counts, dtype=torch.float32, device=self.squares.device).clamp(min=1)
        return self.squares / counts.view(-1, *[1] * (self.squares.ndim - 1))


class GramStatistics(NormStatistics):
    """Gram matrix Σ x xᵀ of the input columns.

    Attributes:
        squares: float32 ``[G, C, C]``; None before the first inputs.
    """

    def add(self, inputs: LayerInputs) -> None:
        """Take in the inputs of one call."""
        columns = inputs.columns.float()
        with full_precision(columns.device):
            products = columns.transpose(1, 2) @ columns
        self._take(inputs.form, inputs.counts, products)

    @staticmethod
    def _zeros(groups: int, columns: int, device: torch.device | None) -> torch.Tensor:
        return torch.zeros(groups, columns, columns, dtype=torch.float32, device=device)

    @property
    def gram(self) -> torch.Tensor:
        """Mean of x xᵀ, float32 ``[G, C, C]``."""
        return self._mean()


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
