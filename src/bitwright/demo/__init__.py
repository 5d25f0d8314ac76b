"""The main job on real input: train a small CNN on handwritten digits, compress it in many ways, compare."""

from __future__ import annotations

from .digits import Digits, load_digits
from .exports import ExportResult, ExportRow, run_exports
from .network import DigitsCNN
from .recipes import EXPORT_RECIPES, RECIPES, Recipe
from .run import DemoResult, DemoRow, run_demo

__all__ = [
    "EXPORT_RECIPES",
    "RECIPES",
    "DemoResult",
    "DemoRow",
    "Digits",
    "DigitsCNN",
    "ExportResult",
    "ExportRow",
    "Recipe",
    "load_digits",
    "run_demo",
    "run_exports",
]
