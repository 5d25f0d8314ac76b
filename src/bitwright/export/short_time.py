"""Short-time Fourier transforms in operators that keep dynamic sizes, as those of PyTorch's own kernels do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["SHORT_TIME"]

_aten = torch.ops.aten


def _transformed_frames(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """``torch.stft`` of signals that it has padded: ``(signals, time)`` to ``(signals, frequencies, frames)``."""
    weights = _padded_window(window, win_length, n_fft, x)
    if align_to_window:
        x = F.pad(x, ((n_fft - (win_length or n_fft)) // 2,) * 2)
    frames = x.unfold(-1, n_fft, hop_length or n_fft // 4) * weights
    norm = "ortho" if normalized else "backward"
    has_half = not frames.is_complex() and onesided is not False
    spectra = (torch.fft.rfft if has_half else torch.fft.fft)(frames, dim=-1, norm=norm).transpose(-1, -2)
    return torch.view_as_real(spectra) if return_complex is False else spectra


def _transformed_padded_frames(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    *others: Any,
    **named: Any,
) -> Any:
    """``torch.stft`` of signals as they are."""
    if center:
        x = F.pad(x.reshape(1, *x.shape), (n_fft // 2,) * 2, mode=pad_mode).squeeze(0)
    return _transformed_frames(x, n_fft, hop_length, win_length, window, *others, **named)


def _signals(
    z: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    """``torch.istft``: the sums of the frames' windowed signals where they overlap, over those of squared windows."""
    if return_complex:
        return NotImplemented
    hop, norm = hop_length or n_fft // 4, "ortho" if normalized else "backward"
    weights = _padded_window(window, win_length, n_fft, z)
    half = z.narrow(-2, 0, n_fft // 2 + 1)
    frames = torch.fft.irfft(half, n_fft, dim=-2, norm=norm) * weights.unsqueeze(-1)
    squares = weights.square().unsqueeze(-1).expand(n_fft, z.shape[-1])
    to_places = torch.eye(n_fft, dtype=frames.dtype, device=z.device).unsqueeze(1)
    sums, norms = (F.conv_transpose1d(one, to_places, stride=hop).select(-2, 0) for one in (frames, squares))
    start = n_fft // 2 if center else 0
    known = sums.shape[-1]
    end = start + length if length is not None else known - start
    signals = sums[..., start:end] / norms[..., start:end]
    return F.pad(signals, (0, end - known)) if length is not None and end > known else signals


def _padded_window(window: Tensor | None, win_length: int | None, n_fft: int, x: Tensor) -> Tensor:
    """A window with zeros on both sides up to the length of a transform."""
    length = win_length or n_fft
    if window is None:
        window = torch.ones(length, dtype=x.dtype.to_real() if x.is_complex() else x.dtype, device=x.device)
    left = (n_fft - length) // 2
    return F.pad(window, (left, n_fft - length - left)) if length < n_fft else window


SHORT_TIME: dict[Any, Callable[..., Any]] = {
    _aten.istft.default: _signals,
    _aten.stft.center: _transformed_padded_frames,
    _aten.stft.default: _transformed_frames,
}
"""Decompositions, which return NotImplemented for arguments that they have no form for."""
