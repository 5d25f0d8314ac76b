"""The short way through a fake quantizer for a tensor like the one before.

What passes through a simulator rarely changes in anything but its values. After a call on the long way
(``FakeQuantizeForward``) a shortcut is made for it: a function that compares everything on which the decisions of the
long way depend, and then calls a prepared kernel. Where anything differs it returns None, and the long way decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from bitwright._utils.direct_calls import Call
from bitwright.kernels.dispatch import note_codes, ready_call, undisturbed

from ._one_pass import tracks_in_place
from ._recall import will_be_repeated
from ._weight_memory import WeightMemory

__all__ = ["observing", "quantizing", "remembering"]

QParams = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

_SHAPES = 16
_backward_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_TRACKED = ("_initialized", "_export_mode", "float_range", "qscheme", "scale_dtype")


def _settings(simulator: Any, calculator: Any) -> Callable[[dict[str, Any]], bool]:
    """Return a function that says whether a simulator, given as its ``__dict__``, is set as it is now."""
    observer, fake_quant, off = simulator._seen
    version = simulator._seen_version
    granularity, dtype, formulation = simulator._granularity, simulator.dtype, simulator.qformulation
    low, high = simulator.quant_min, simulator.quant_max

    def unchanged(state: dict[str, Any]) -> bool:
        buffers = state["_buffers"]
        return (
            buffers["observer_enabled"] is observer
            and buffers["fake_quant_enabled"] is fake_quant
            and buffers["_disabled"] is off
            and observer._version + fake_quant._version + off._version == version
            and state["_modules"]["qparams_calculator"] is calculator
            and state["_granularity"] is granularity
            and state["quant_min"] is low
            and state["quant_max"] is high
            and state["dtype"] is dtype
            and state["qformulation"] is formulation
        )

    return unchanged


def _is_simple(x: torch.Tensor) -> bool:
    return x.is_cpu and x.layout is torch.strided and x.is_contiguous() and not x.is_neg()


def _with_gradient(ready: Any, x: torch.Tensor, made: QParams, unneeded: bool) -> torch.Tensor:
    """Call a prepared kernel where a gradient is wanted."""
    y: torch.Tensor = ready.run_with_gradient(x, unneeded)
    note_codes(y, made, ready)
    return y


def quantizing(simulator: Any, calculator: Any, tensor: torch.Tensor) -> Call | None:
    """Make the shortcut for an observer that is off; None if there is none.

    Args:
        simulator: a simulator that has just taken the long way and whose classes are Bitwright's own.
        calculator: its calculator.
        tensor: what it was given.
    """
    buffers = calculator._buffers
    made = buffers["scale"], buffers["zero_point"], buffers["minval"]
    ready = _ready(simulator, tensor, made)
    if ready is None:
        return None
    scale, point, origin = made
    unchanged, dtype = _settings(simulator, calculator), tensor.dtype
    other = scale if point is None else origin if simulator._current_grid().formulation == "minval" else point
    name = "scale" if point is None else "minval" if other is origin else "zero_point"
    at, other_at = scale.data_ptr(), other.data_ptr()
    known = {tensor.shape: ready}

    def call(simulator: Any, x: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        if (
            type(x) is not torch.Tensor
            or x.dtype is not dtype
            or not unchanged(simulator.__dict__)
            or buffers["scale"] is not scale
            or buffers[name] is not other
            or scale.data_ptr() != at
            or other.data_ptr() != other_at
            or not undisturbed()
        ):
            return None
        ready = known.get(x.shape)
        if ready is None:
            ready = _another(known, simulator, x, made)
        if ready is None or not _is_simple(x):
            return None
        if x.requires_grad and _grad_enabled():
            return _with_gradient(ready, x, made, unneeded)
        quantized: torch.Tensor = ready.run(x)
        return quantized

    return call


def _ready(simulator: Any, tensor: torch.Tensor, made: QParams, **options: Any) -> Any:
    if type(tensor) is not torch.Tensor or any(t is not None and t.is_inference() for t in made):
        return None
    block_size, grid = simulator._block_size(tensor.shape), simulator._current_grid()
    return ready_call(tensor, made, block_size=block_size, grid=grid, **options)


def _another(known: dict[torch.Size, Any], simulator: Any, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """Prepare the kernel for a further shape; None where there is none."""
    try:
        ready = _ready(simulator, tensor, *rest, **options)
    except ValueError:  # the long way meets it again and says so
        return None
    if ready is not None:
        if len(known) >= _SHAPES:
            known.clear()
        known[tensor.shape] = ready
    return ready


def observing(simulator: Any, calculator: Any, tensor: torch.Tensor) -> Call | None:
    """Make the shortcut for a running range and an observer that is on; None if there is none.

    Takes the arguments of ``quantizing``.
    """
    if not tracks_in_place(calculator, tensor.dtype, tensor.device):
        return None
    buffers, progress, modules = calculator._buffers, calculator._progress, calculator._modules
    names = ("running_min", "running_max", "scale", "zero_point", "minval")
    running_min, running_max, scale, zero_point, minval = (buffers[name] for name in names)
    made = scale, zero_point, minval
    average = getattr(calculator, "averaging_constant", None)
    options: dict[str, Any] = {
        "running": (running_min, running_max),
        "scheme": calculator.qscheme.value,
        "scale_dtype": calculator.scale_dtype,
        "averaging_constant": average,
    }
    ready = _ready(simulator, tensor, made, **options)
    if ready is None or simulator._layout.counts != running_min.shape:
        return None
    unchanged, dtype, quantize = _settings(simulator, calculator), tensor.dtype, simulator._fake_quant_on
    settings = calculator.__dict__
    initialized, exporting, fixed, scheme, scale_dtype = (settings[name] for name in _TRACKED)
    ranges, known = modules["range_calculator"], {tensor.shape: ready}
    state = [(name, t, t.data_ptr()) for name, t in zip(names, (running_min, running_max, *made), strict=True)
             if t is not None]  # fmt: skip
    written = [t for _, t, _ in state]

    def call(simulator: Any, x: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        if (
            type(x) is not torch.Tensor
            or x.dtype is not dtype
            or not unchanged(simulator.__dict__)
            or settings["_initialized"] is not initialized
            or settings["_export_mode"] is not exporting
            or settings["float_range"] is not fixed
            or settings["qscheme"] is not scheme
            or settings["scale_dtype"] is not scale_dtype
            or settings.get("averaging_constant") is not average
            or modules["range_calculator"] is not ranges
            or not undisturbed()
            or _backward_task() != -1
            or will_be_repeated(simulator.__dict__["training"], False)
        ):
            return None
        ready = known.get(x.shape)
        if ready is None:
            ready = _another(known, simulator, x, made, **options)
            if simulator._layout.counts != running_min.shape:
                known.clear()
                return None
        if ready is None or not _is_simple(x):
            return None
        for name, tensor, address in state:
            if buffers[name] is not tensor or tensor.data_ptr() != address:
                return None
        y = x
        plain = quantize and not (x.requires_grad and _grad_enabled())
        if plain:
            y = ready.observe_and_run(x, progress.restart)
        else:
            ready.observe(x, progress.restart)
        increment_version(written)
        progress.count()
        return _with_gradient(ready, x, made, unneeded) if quantize and not plain else y

    return call


def remembering(simulator: Any, calculator: Any, weight: torch.Tensor) -> Call | None:
    """Make the shortcut for a weight whose quantized form is kept; None if it is not.

    Takes the arguments of ``quantizing``.
    """
    memory: WeightMemory = simulator._memory
    state, output = memory.kept_state, memory.output
    if state is None or output is None or output.is_inference():
        return None
    unchanged, grid = _settings(simulator, calculator), simulator._current_grid()
    buffers = calculator._buffers

    def call(simulator: Any, weight: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        own = simulator.__dict__
        if (
            own["training"]
            or memory.output is not output
            or memory.kept_state is not state
            or not simulator.keep_frozen_weight
            or not unchanged(own)
            or not state.matches(weight, (buffers["scale"], buffers["zero_point"], buffers["minval"]), grid)
            or (weight.requires_grad and _grad_enabled())
        ):
            return None
        return output

    return call
