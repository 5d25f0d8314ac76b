"""What calibration learns about the inputs of a layer. Statistics merge: over batches, uses and processes."""

from __future__ import annotations

import torch

from bitwright._utils.full_precision import full_precision

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
            self.count = 0
        assert self.squares is not None
        counts = torch.tensor(self.count, device=device)
        torch.distributed.all_reduce(self.squares)
        torch.distributed.all_reduce(counts)
        self.count = int(counts)
        if self.count == 0:
            self.form = self.squares = None

    @staticmethod
    def _zeros(groups: int, columns: int, device: torch.device | None) -> torch.Tensor:
        return torch.zeros(groups, columns, dtype=torch.float32, device=device)

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
        with full_precision(columns.device):
            products = columns.transpose(1, 2) @ columns
        self._take(inputs.form, columns.shape[1], products)

    @staticmethod
    def _zeros(groups: int, columns: int, device: torch.device | None) -> torch.Tensor:
        return torch.zeros(groups, columns, columns, dtype=torch.float32, device=device)

    @property
    def gram(self) -> torch.Tensor:
        """Mean of x xᵀ, float32 ``[G, C, C]``."""
        assert self.squares is not None
        return self.squares / max(self.count, 1)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
