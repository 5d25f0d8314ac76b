"""The main job on real input: train a small CNN on handwritten digits, compress it in many ways, compare."""

from __future__ import annotations

from .digits import Digits, load_digits
from .network import DigitsCNN
from .recipes import RECIPES, Recipe
from .run import DemoResult, DemoRow, run_demo

__all__ = ["RECIPES", "DemoResult", "DemoRow", "Digits", "DigitsCNN", "Recipe", "load_digits", "run_demo"]
