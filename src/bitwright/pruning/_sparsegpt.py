"""SparseGPT: remove entries column by column, and let the columns that follow make up for the error.

Frantar and Alistarh, arXiv 2301.00774, algorithm 1. With H the Gram matrix of the inputs and U the upper Cholesky
factor of its inverse, removing w in column j adds the error w / U[j, j], and the columns after j change by that times
-U[j].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bitwright._utils.full_precision import full_precision
from bitwright.pruning.spec.scheme import keep_largest

__all__ = ["InverseFactor", "MaskRule", "compensate", "group_rule", "sparsity_rule"]

_BLOCK = 128
_DAMPING = 0.01
_MOST_DAMPING = 10.0

MaskRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Block of weights ``[R, B]`` and the squared diagonal of U ``[B]``, to which of the block's entries to keep."""


class InverseFactor:
    """The upper Cholesky factor of the inverse of a damped Gram matrix.

    Attributes:
        upper: float32 ``[C, C]``.
        diagonal: float32 ``[C]``, diagonal of the inverse.
    """

    def __init__(self, gram: torch.Tensor) -> None:
        hessian = gram.double() if gram.device.type == "cpu" else gram.float()
        unused = hessian.diagonal() == 0
        mean = hessian.diagonal().mean()
        mean = torch.where(mean > 0, mean, 1.0)
        # With J reversing rows and columns, J H J = L L' makes J inv(L) J the factor sought.
        lower = _damped_factor((hessian / mean).flip(0, 1)) * mean.sqrt()
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
        # An input that is always zero is worth nothing, whatever its weights.
        self.diagonal = torch.where(unused, torch.inf, upper.square().sum(0)).float()
        self.upper = upper.float()


def _damped_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Lower Cholesky factor of a Gram matrix whose diagonal has mean 1 (or 0), damped as much as that takes.

    Sums so small that rounding decides about them need not be definite with any damping: the inputs then count as
    independent of each other.
    """
    idle = hessian.diagonal().mean() == 0
    damping = _DAMPING
    while damping <= _MOST_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(idle.float() + damping)
        lower: torch.Tensor
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            return lower
        damping *= 10  # more inputs than samples, and nearly dependent ones
    return (hessian.diagonal() + _DAMPING).sqrt().diag()


def sparsity_rule(sparsity: float, rows: bool) -> MaskRule:
    """Keep all but a share of each block, in each row of it or in the whole."""

    def keep(block: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return keep_largest(block.square() / squares, sparsity, len(block) if rows else 1)

    return keep


def group_rule(removed: int, size: int) -> MaskRule:
    """Remove the same number of entries from every group of neighbours in a row."""

    def keep(block: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        scores = (block.square() / squares).reshape(len(block), -1, size)
        kept = torch.ones_like(scores, dtype=torch.bool)
        kept.scatter_(2, scores.argsort(stable=True, dim=2)[..., :removed], False)
        return kept.reshape(block.shape)

    return keep


def compensate(
    weight: torch.Tensor, factor: InverseFactor, rule: MaskRule | torch.Tensor, block: int = _BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pruned and adjusted weight, and its mask.

    Args:
        weight: float32 ``[R, C]``.
        factor: of the inputs, C columns.
        rule: what to keep, or the mask itself, bool ``[R, C]``.
        block: columns whose mask is chosen at once.
    """
    left = weight.float().clone()
    upper = factor.upper
    mask = torch.ones_like(left, dtype=torch.bool)
    for start in range(0, left.shape[1], block):
        stop = min(start + block, left.shape[1])
        inner = upper[start:stop, start:stop]
        part = left[:, start:stop]
        if isinstance(rule, torch.Tensor):
            kept = rule[:, start:stop]
        else:
            squares = torch.where(factor.diagonal[start:stop].isinf(), torch.inf, inner.diagonal().square())
            kept = rule(part, squares)
        mask[:, start:stop] = kept
        errors = torch.zeros_like(part)
        for column in range(stop - start):
            error = torch.where(kept[:, column], 0.0, part[:, column]) / inner[column, column]
            part[:, column:] -= error.unsqueeze(1) * inner[column, column:]
            errors[:, column] = error
        with full_precision(left.device):
            left[:, stop:] -= errors @ upper[start:stop, stop:]
    return torch.where(mask, left, 0.0), mask
