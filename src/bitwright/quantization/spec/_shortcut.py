"""The short way through a fake quantizer for a tensor like the one before.

What passes through a simulator rarely changes in anything but its values. After a call on the long way
(``FakeQuantizeForward``) a shortcut is made for it: a function that compares everything on which the decisions of the
long way depend, and then calls a prepared kernel. Where anything differs it returns None, and the long way decides.
Attributes are not compared: setting one takes the shortcut away. The comparisons stand in each function in full, since
a call would cost as much as they do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from bitwright._utils.direct_calls import Call
from bitwright.kernels import Task
from bitwright.kernels.dispatch import note_codes, ready_call, take_snapshot, undisturbed
from bitwright.kernels.layout import SMALL, dense
from bitwright.kernels.many import LARGEST
from bitwright.kernels.remade import remember_making
from bitwright.kernels.saved import hooked_by_others

from ._one_pass import has_bounds_of, is_plainly_static, measures_both_ends, tracks_in_place
from ._weight_memory import WeightMemory, measurement, watch
from .granularity import PerTensorGranularity

__all__ = ["following", "is_repeated", "observing", "quantizing", "remembering"]

QParams = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

_SHAPES = 16
_is_cpu = operator.attrgetter("is_cpu")
_STRIDED = torch.strided
_WEIGHTS = (torch.Tensor, torch.nn.Parameter)
_backward_task = torch._C._current_graph_task_id
_increment_version = torch._C._increment_version
_grad_enabled = torch.is_grad_enabled
_STATE = ("running_min", "running_max", "scale", "zero_point", "minval")
_TRACKED = ("_initialized", "_export_mode", "float_range", "qscheme", "scale_dtype", "quant_min", "quant_max")


def _switches(simulator: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the buffers of a simulator's switches; None where they cannot be watched, or lie elsewhere."""
    buffers: tuple[Any, ...] = simulator._seen
    return buffers if undisturbed() and all(_is_watched(b, tensor) for b in buffers) else None


def _is_watched(b: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return (
        b is not None
        and b.device == tensor.device
        and b.element_size() == 1
        and b.numel() == 1
        and not b.is_inference()
    )


def _place(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a function that says whether a tensor is on the CPU, or on the same GPU, as this one is."""
    if tensor.is_cpu:
        return _is_cpu
    device = tensor.get_device()
    return lambda x: x.is_cuda and x.get_device() == device


def quantizing(simulator: Any, calculator: Any, tensor: torch.Tensor) -> Call | None:
    """Make the shortcut for an observer that is off; None if there is none.

    Args:
        simulator: a simulator that has just taken the long way and whose classes are Bitwright's own.
        calculator: its calculator.
        tensor: what it was given.
    """
    switches = _switches(simulator, tensor)
    if switches is None:
        return None
    observer, fake_quant, off = switches
    snapshot = take_snapshot(*switches)
    buffers = calculator._buffers
    made = buffers["scale"], buffers["zero_point"], buffers["minval"]
    ready = _ready(simulator, tensor, made, snapshot=snapshot)
    if ready is None:
        return None
    scale, point, origin = made
    dtype, here = tensor.dtype, _place(tensor)
    other = scale if point is None else origin if simulator._current_grid().formulation == "minval" else point
    name = "scale" if point is None else "minval" if other is origin else "zero_point"
    at, other_at = scale.data_ptr(), other.data_ptr()
    whole = _is_whole(simulator)
    known: dict[Any, Any] = {tensor.numel() if whole else tensor.shape: ready}

    def call(simulator: Any, x: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        own = simulator.__dict__
        switch = own["_buffers"]
        if (
            type(x) is not torch.Tensor
            or x.dtype is not dtype
            or switch["observer_enabled"] is not observer
            or switch["fake_quant_enabled"] is not fake_quant
            or switch["_disabled"] is not off
            or buffers["scale"] is not scale
            or buffers[name] is not other
            or scale.data_ptr() != at
            or other.data_ptr() != other_at
            or not undisturbed()
        ):
            return None
        key = x.numel() if whole else x.shape
        ready = known.get(key)
        if ready is None:
            ready = _another(known, key, simulator, x, made, snapshot=snapshot)
        if ready is None or not here(x) or x.layout is not _STRIDED or x.is_neg():
            return None
        if not x.is_contiguous():
            if not whole:
                return None
            x, order = dense(x)
            unneeded = unneeded or order is None  # a copy is nobody else's
        if not (x.requires_grad and _grad_enabled()):
            quantized: torch.Tensor | None = ready.run(x)
            return quantized
        if not snapshot.holds():
            return None
        y: torch.Tensor = ready.run_with_gradient(x, unneeded)
        note_codes(y, made, ready)
        return y

    return call


def _is_whole(simulator: Any) -> bool:
    """Whether the order of the elements does not matter."""
    return isinstance(simulator._granularity, PerTensorGranularity)


def _ready(simulator: Any, tensor: torch.Tensor, made: QParams, **options: Any) -> Any:
    if type(tensor) is not torch.Tensor or any(t is not None and t.is_inference() for t in made):
        return None
    if _is_whole(simulator) and tensor.layout is _STRIDED:
        tensor = tensor.detach().contiguous()
    block_size, grid = simulator._block_size(tensor.shape), simulator._current_grid()
    return ready_call(tensor, made, block_size=block_size, grid=grid, **options)


def _another(known: dict[Any, Any], key: Any, simulator: Any, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """Prepare the kernel for a further shape; None where there is none."""
    try:
        ready = _ready(simulator, tensor, *rest, **options)
    except ValueError:  # the long way meets it again and says so
        return None
    if ready is not None:
        if len(known) >= _SHAPES:
            known.clear()
        known[key] = ready
    return ready


def _observation(calculator: Any) -> dict[str, Any]:
    """How a kernel moves a calculator's running range, and chooses the parameters."""
    return {
        "running": (calculator._buffers["running_min"], calculator._buffers["running_max"]),
        "scheme": calculator.qscheme.value,
        "scale_dtype": calculator.scale_dtype,
        "averaging_constant": getattr(calculator, "averaging_constant", None),
    }


def observing(simulator: Any, calculator: Any, tensor: torch.Tensor) -> Call | None:
    """Make the shortcut for a running range and an observer that is on; None if there is none.

    Takes the arguments of ``quantizing``.
    """
    switches = _switches(simulator, tensor)
    if switches is None or not tracks_in_place(calculator, tensor.dtype, tensor.device):
        return None
    observer, fake_quant, off = switches
    version = simulator._seen_version
    buffers, progress, modules = calculator._buffers, calculator._progress, calculator._modules
    running_min, made = buffers["running_min"], (buffers["scale"], buffers["zero_point"], buffers["minval"])
    options = _observation(calculator)
    ready, average = _ready(simulator, tensor, made, **options), options["averaging_constant"]
    if ready is None or simulator._layout.counts != running_min.shape:
        return None
    dtype, quantize, whole = tensor.dtype, simulator._fake_quant_on, _is_whole(simulator)
    here, mixed = _place(tensor), running_min.dtype != tensor.dtype
    settings = calculator.__dict__
    initialized, exporting, fixed, scheme, scale_dtype, least, most = (settings[name] for name in _TRACKED)
    ranges, known = modules["range_calculator"], {tensor.shape: ready}
    state = [(name, buffers[name], buffers[name].data_ptr()) for name in _STATE if buffers[name] is not None]
    written = [t for _, t, _ in state]

    def call(simulator: Any, x: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        switch = simulator.__dict__["_buffers"]
        if (
            type(x) is not torch.Tensor
            or x.dtype is not dtype
            or switch["observer_enabled"] is not observer
            or switch["fake_quant_enabled"] is not fake_quant
            or switch["_disabled"] is not off
            or observer._version + fake_quant._version + off._version != version
            or settings["_initialized"] is not initialized
            or settings["_export_mode"] is not exporting
            or settings["float_range"] is not fixed
            or settings["qscheme"] is not scheme
            or settings["scale_dtype"] is not scale_dtype
            or settings["quant_min"] is not least
            or settings["quant_max"] is not most
            or settings.get("averaging_constant") is not average
            or modules["range_calculator"] is not ranges
            or not undisturbed()
            or (mixed and progress.restart)
            or _backward_task() != -1
            or hooked_by_others()
        ):
            return None
        ready = known.get(x.shape)
        if ready is None:
            ready = _another(known, x.shape, simulator, x, made, **options)
            if simulator._layout.counts != running_min.shape:
                known.clear()
                return None
        if ready is None or not here(x) or x.layout is not _STRIDED or x.is_neg():
            return None
        for name, tensor, address in state:
            if buffers[name] is not tensor or tensor.data_ptr() != address:
                return None
        y = x
        if not x.is_contiguous():
            if not whole:
                return None
            x, order = dense(x)
            unneeded = unneeded or order is None  # a copy is nobody else's
        _increment_version(written)
        if not quantize:
            ready.observe(x, progress.restart)
        elif x.requires_grad and _grad_enabled():
            y = ready.run_with_gradient(x, unneeded, True, progress.restart)
            note_codes(y, made, ready)
        else:
            y = ready.observe_and_run(x, progress.restart)
        if progress.restart:
            progress.count()
        else:
            progress.observations += 1
        return y

    return call


def remembering(simulator: Any, calculator: Any, weight: torch.Tensor) -> Call | None:
    """Make the shortcut for a weight whose quantized form is kept; None if it is not.

    Takes the arguments of ``quantizing``.
    """
    memory: WeightMemory = simulator._memory
    kept, version, switches = memory.output, memory.kept_version, _switches(simulator, weight)
    if kept is None or kept.is_inference() or switches is None:
        return None
    observer, fake_quant, off = switches
    observes = simulator._observer_on and not calculator.is_frozen
    buffers, grid = calculator._buffers, simulator._current_grid()
    still = watch(weight, (buffers["scale"], buffers["zero_point"], buffers["minval"]), grid, switches)
    if still is None:
        return None

    def call(simulator: Any, weight: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        own = simulator.__dict__
        switch = own["_buffers"]
        if (
            own["training"]
            or memory.kept is not kept
            or kept._version != version
            or (observes and memory.measured_with != measurement(calculator))
            or switch["observer_enabled"] is not observer
            or switch["fake_quant_enabled"] is not fake_quant
            or switch["_disabled"] is not off
            or not still(weight, (buffers["scale"], buffers["zero_point"], buffers["minval"]), grid)
            or (weight.requires_grad and _grad_enabled())
        ):
            return None
        return kept

    return call


def following(simulator: Any, calculator: Any, weight: torch.Tensor) -> Call | None:
    """Make the shortcut for a weight, not a very large one, that is observed, if at all, and quantized at every call.

    Takes the arguments of ``quantizing``; the weight may be one that was computed. ``simulator._shortcut.task`` then
    says what the shortcut does.
    """
    switches, kind = _switches(simulator, weight), type(weight)
    if switches is None or kind not in _WEIGHTS or (weight.is_cpu and weight.numel() > LARGEST):
        return None
    observes = simulator._observer_on and not calculator.is_frozen
    if not simulator._fake_quant_on or (observes and not _is_measured_at_once(simulator, calculator)):
        return None
    observer, fake_quant, off = switches
    version = simulator._seen_version
    buffers, modules, settings = calculator._buffers, calculator._modules, calculator.__dict__
    scale, point, origin = made = buffers["scale"], buffers["zero_point"], buffers["minval"]
    block_size, shape = simulator._block_size(weight.shape), weight.shape
    if any(t is not None and t.is_inference() for t in made) or (observes and simulator._layout.counts != scale.shape):
        return None
    scheme = calculator.qscheme.value if observes else None
    task = Task(made, block_size, simulator._current_grid(), scheme, calculator.scale_dtype if observes else None)
    initialized, exporting, fixed, named, scale_dtype, least, most = (settings[name] for name in _TRACKED)
    ranges = modules["range_calculator"]

    def what(simulator: Any, weight: torch.Tensor) -> Task | None:
        own = simulator.__dict__
        switch = own["_buffers"]
        if (
            type(weight) is not kind
            or weight.shape != shape
            or switch["observer_enabled"] is not observer
            or switch["fake_quant_enabled"] is not fake_quant
            or switch["_disabled"] is not off
            or observer._version + fake_quant._version + off._version != version
            or buffers["scale"] is not scale
            or buffers["zero_point"] is not point
            or buffers["minval"] is not origin
            or settings["_initialized"] is not initialized
            or settings["_export_mode"] is not exporting
            or settings["float_range"] is not fixed
            or settings["qscheme"] is not named
            or settings["scale_dtype"] is not scale_dtype
            or settings["quant_min"] is not least
            or settings["quant_max"] is not most
            or modules["range_calculator"] is not ranges
            or not (own["training"] or (weight.requires_grad and _grad_enabled()))
        ):
            return None
        return task

    remembered = weight.numel() >= SMALL and kind is torch.nn.Parameter

    def call(simulator: Any, weight: torch.Tensor, unneeded: bool) -> torch.Tensor | None:
        task = what(simulator, weight)
        if task is None or not undisturbed() or is_repeated(simulator):
            return None
        y = task.run(weight)
        if remembered and y is not None:
            remember_making(y, weight, task.made, task.block_size, task.grid, task.again)
        return y

    simulator._shortcut.task = what
    return call


def _is_measured_at_once(simulator: Any, calculator: Any) -> bool:
    """Whether a kernel finds the parameters that a calculator chooses for a weight."""
    plainly = is_plainly_static(calculator) and measures_both_ends(calculator)
    return plainly and has_bounds_of(calculator, simulator)


def is_repeated(simulator: Any) -> bool:
    """Whether this call is one of gradient checkpointing, whose two passes must save the same tensors."""
    return _backward_task() != -1 or hooked_by_others()
