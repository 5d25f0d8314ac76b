"""Attention with a comparison of sizes for its flag, which PyTorch refuses while ``torch.export`` captures a model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["attention", "attention_with_plain_flag"]

attention = functional.scaled_dot_product_attention


def attention_with_plain_flag(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Call ``scaled_dot_product_attention`` with Python's truth values, to which ``torch.export`` holds the sizes."""
    result: torch.Tensor = attention(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
    return result


def _plain(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value
