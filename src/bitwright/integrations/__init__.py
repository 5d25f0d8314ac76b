"""Adapters to training loops of other libraries; each imports its library only when it is asked for."""

from __future__ import annotations

__all__: list[str] = []
