"""Fake quantization and its relatives: one meaning, a form for each device."""

from __future__ import annotations

from .dispatch import (
    choose_qparams,
    dequantize,
    fake_quantize,
    form_of,
    min_max,
    observe_and_fake_quantize,
    observe_running_and_fake_quantize,
    quantize,
    release_idle_memory,
    set_form,
)
from .grid import Grid, block_counts
from .learned import learned_gradient
from .many import Task, fake_quantize_many
from .remade import quantized_weights_kept
from .saved import saved_as_codes

__all__ = [
    "Grid",
    "Task",
    "block_counts",
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "fake_quantize_many",
    "form_of",
    "learned_gradient",
    "min_max",
    "observe_and_fake_quantize",
    "observe_running_and_fake_quantize",
    "quantize",
    "quantized_weights_kept",
    "release_idle_memory",
    "saved_as_codes",
    "set_form",
]
