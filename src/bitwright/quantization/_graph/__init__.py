"""Graph execution mode: simulators in an exported graph."""

from __future__ import annotations

from .engine import GraphEngine

__all__ = ["GraphEngine"]
