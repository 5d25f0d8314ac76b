"""scikit-learn's handwritten digits as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Digits", "load_digits"]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images ``[N, 1, 8, 8]`` float32 in [0, 1] and labels ``[N]`` int64, split once into train and test."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the training set once, shuffled, in full batches."""
        order = torch.randperm(len(self.train_images), generator=generator)
        for start in range(0, len(order) - size + 1, size):
            picked = order[start : start + size]
            yield self.train_images[picked], self.train_labels[picked]


def load_digits(test_share: float = 0.25, seed: int = 0) -> Digits:
    """Return the 1,797 digits that ship with scikit-learn.

    Raises:
        ImportError: scikit-learn is missing; names the extra that brings it.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError('The demo needs scikit-learn: pip install "bitwright[demo]".') from error
    data = load()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    held_out = int(len(images) * test_share)
    return Digits(images[held_out:], labels[held_out:], images[:held_out], labels[:held_out])
