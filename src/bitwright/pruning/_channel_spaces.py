"""Spaces of channels: what goes together when a channel goes.

A *space* is a set of channels that several tensors have in common: what a convolution puts out, a batch norm scales, a
residual add joins, and the next convolution reads. Where values are concatenated, the channels of the result are
several spaces one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

__all__ = ["Channels", "Part", "Reader", "Space", "Tensor"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A parameter or buffer with an axis of which a stretch belongs to a space.

    Attributes:
        path: path of its owner.
        attribute: its name there; a bias may be missing.
        axis: the axis.
        repeats: entries along the axis for each channel.
        offset: entry of the first channel.
    """

    path: str
    attribute: str
    axis: int
    repeats: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A layer that sums over the channels of a space.

    Attributes:
        path: path of the layer.
        module: the layer.
        dim: channel dimension of its input.
        repeats: entries along that dimension for each channel.
        offset: entry of the first channel.
        constant: channels that are constant in its input.
    """

    path: str
    module: nn.Module
    dim: int
    repeats: int
    offset: int
    constant: torch.Tensor

    @property
    def entries(self) -> slice:
        """Where the channels are along the dimension."""
        return slice(self.offset, self.offset + self.repeats * len(self.constant))


@dataclass(eq=False, slots=True)
class Space:
    """Channels that go together.

    Attributes:
        size: number of channels.
        tensors: what has an axis along them.
        readers: who sums over them.
        writers: paths of the layers that put them out.
        fixed: why they must stay, or None.
        merged: the space that this one became part of.
    """

    size: int
    tensors: list[Tensor] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    fixed: str | None = None
    merged: Space | None = None

    def root(self) -> Space:
        """Return the space that this one is part of by now."""
        space = self
        while space.merged is not None:
            space = space.merged
        return space

    def join(self, other: Space) -> Space:
        """Make one space of two."""
        first, second = self.root(), other.root()
        if first is second:
            return first
        first.tensors += second.tensors
        first.readers += second.readers
        first.writers += second.writers
        first.fixed = first.fixed or second.fixed
        second.merged = first
        return first

    def fix(self, reason: str) -> None:
        """Keep all channels; the first reason counts."""
        space = self.root()
        space.fixed = space.fixed or reason


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A stretch of a value's channels that is one space.

    Attributes:
        space: the space.
        constant: which channels are the same everywhere, bool ``[C]``.
        zero: which of them are zero.
        repeats: entries for each channel.
    """

    space: Space
    constant: torch.Tensor
    zero: torch.Tensor
    repeats: int = 1

    @property
    def entries(self) -> int:
        """Number of entries along the dimension."""
        return self.repeats * len(self.constant)


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """Channels of one value: the dimension that they run along, and its parts in order."""

    dim: int
    parts: tuple[Part, ...]

    def with_offsets(self) -> list[tuple[int, Part]]:
        """Return the parts, each with the entry that it begins at."""
        found = []
        offset = 0
        for part in self.parts:
            found.append((offset, part))
            offset += part.entries
        return found

    def moved(self, dim: int) -> Channels:
        """Return the same channels along another dimension."""
        return Channels(dim, self.parts)

    def repeated(self, times: int) -> Channels:
        """Return the channels with so many entries in place of one, as a flatten leaves them."""
        return Channels(self.dim, tuple(replace(part, repeats=part.repeats * times) for part in self.parts))

    def without_zeros(self) -> Channels:
        """Return the channels after a function that does not map zero to zero."""
        return Channels(self.dim, tuple(replace(part, zero=torch.zeros_like(part.zero)) for part in self.parts))

    def constant_where_zero(self) -> Channels:
        """Return the channels after a function that meets zeros at the border."""
        return Channels(self.dim, tuple(replace(part, constant=part.constant & part.zero) for part in self.parts))

    def fix(self, reason: str) -> None:
        """Keep the channels of all parts."""
        for part in self.parts:
            part.space.fix(reason)
