"""Configuration × program = plan: one row per tensor, every problem found before the model is touched."""

from __future__ import annotations

from .plan import Placement, Plan, PlanRow, Problem, Severity, Site

__all__ = ["Placement", "Plan", "PlanRow", "Problem", "Severity", "Site"]
