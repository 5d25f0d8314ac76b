"""Eager execution mode: simulators as parametrizations, forward hooks and intercepted calls."""

from __future__ import annotations

from .engine import EagerEngine

__all__ = ["EagerEngine"]
