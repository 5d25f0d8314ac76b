"""The kernels that the rest of the package calls: each runs in the fastest form that fits its tensors.

Plain CPU tensors go to the fused CPU form, CUDA tensors to the fused CUDA form. The reference runs for everything else:
tensor subclasses and fake tensors, other devices and dtypes, empty tensors, under function transforms, forward-mode
differentiation, dispatch modes and tracing, and while ``torch.compile`` traces. ``torch.export`` sees the one operator
``bitwright::fake_quantize``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import reference
from .environment import chosen
from .grid import Grid
from .saved import CodesOnDemand, mark, marking

__all__ = [
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "form_for",
    "form_of",
    "is_exporting",
    "is_plain_torch",
    "marked",
    "min_max",
    "note_codes",
    "observe_and_fake_quantize",
    "observe_running_and_fake_quantize",
    "quantize",
    "ready_call",
    "release_idle_memory",
    "set_form",
    "take_snapshot",
    "undisturbed",
]

logger = logging.getLogger(__name__)

_FORMS = ("auto", "reference")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SAVED_RARELY = 8
"""Of results that no operation has saved so many times in a row, one in so many is noted for ``saved_as_codes``."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_reference_only = chosen("BITWRIGHT_KERNELS", _FORMS) == "reference"
_dispatch_depth = torch._C._len_torch_dispatch_stack
_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state


def set_form(name: str) -> str:
    """Choose the form of the kernels for this process and return the previous choice.

    Args:
        name: ``"auto"`` for the fastest form that fits, ``"reference"`` for plain torch everywhere. The environment
            variable ``BITWRIGHT_KERNELS`` sets the initial choice.

    Raises:
        ValueError: another name.
    """
    global _reference_only
    if name not in _FORMS:
        raise ValueError(f"The form of the kernels must be one of {_FORMS}, got {name!r}.")
    before = _FORMS[_reference_only]
    _reference_only = name == "reference"
    return before


@functools.cache
def _cpu_form() -> Any:
    """The fused CPU form, or the reference where it cannot run."""
    try:
        from .cpu.compiling import unsupported_reason

        reason = unsupported_reason()
        if reason is None:
            from .cpu import fused

            return fused
    except ImportError as error:
        reason = f"Numba cannot be imported: {error}"
    logger.warning("The fused CPU kernels are off (%s); the slower reference form runs instead.", reason)
    return reference


@functools.cache
def _cuda_form() -> Any:
    """The fused CUDA form, or the reference where Triton is missing."""
    try:
        from .cuda import fused

        return fused
    except ImportError as error:
        logger.warning("The fused CUDA kernels are off (%s); the slower reference form runs instead.", error)
        return reference


def form_of(x: torch.Tensor) -> Any:
    """Return the module whose kernels take this tensor: the fused CPU or CUDA form, or ``kernels.reference``."""
    if (
        type(x) not in _PLAIN
        or x.dtype not in _FLOATS
        or x.layout is not torch.strided
        or x.numel() == 0
        or x.is_neg()
        or not undisturbed()
    ):
        return reference
    if x.is_cpu:
        return _cpu_form()
    return _cuda_form() if x.is_cuda else reference


def is_plain_torch() -> bool:
    """Return whether no dispatch mode, function transform, forward-mode differentiation or trace is in force."""
    return not (
        _dispatch_depth() or _transforms_active() or forward_ad._current_level >= 0 or _tracing_state() is not None
    )


def undisturbed() -> bool:
    """Return whether a plain tensor may go straight to a fused kernel here; ``form_of`` asks this and more."""
    # ``is_plain_torch`` without the call: this is asked before every small tensor.
    return not (
        _reference_only
        or _dispatch_depth()
        or _transforms_active()
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
    )


def ready_call(
    x: torch.Tensor,
    made: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    **options: Any,
) -> Any:
    """Prepare calls for tensors like this one, or return None where they gain nothing or cannot be prepared.

    Args:
        x: the tensor.
        made: scale, zero point and minval as an observer keeps them.
        **options: the further arguments of ``ReadyCall``.
    """
    form = form_of(x)
    if form is reference or not x.is_contiguous():
        return None
    ready: Any = _ready_of(form)
    return ready.ReadyCall(x, made, **options) if ready.suits(x, made, **options) else None


def _ready_of(form: Any) -> Any:
    """The module of prepared calls of a fused form."""
    if form is _cpu_form():
        from .cpu import ready
    else:
        from .cuda import ready  # type: ignore[no-redef]
    return ready


def release_idle_memory() -> None:
    """Give the memory that the CPU kernels keep for later results back to the system.

    At most ``BITWRIGHT_IDLE_MEGABYTES`` (256) MiB are kept, most of it by training, whose next step uses it again.
    """
    if _cpu_form() is reference:
        return
    from .cpu import memory

    memory.forget_sources()
    memory.release_idle()


def note_codes(y: torch.Tensor, made: Any, ready: Any) -> None:
    """Note on the result of a prepared call, for ``saved_as_codes``, how it was made, where that is in force.

    Calls for a GPU, and those whose results come with their codes, see to it themselves. Where operations have saved
    none of the latest results, few are noted until one is saved again.
    """
    if ready.encodes or not y.is_cpu or not marking(y):
        return
    ready.unsaved += 1
    if ready.unsaved <= _SAVED_RARELY or ready.unsaved % _SAVED_RARELY == 0:
        block_size = tuple(y.shape) if made[0].numel() == 1 else ready.block_size
        mark(y, CodesOnDemand(y, made, block_size, ready.grid, _cpu_form(), ready.encode_from_now_on))


def take_snapshot(*tensors: torch.Tensor) -> Any:
    """Return an object whose ``holds()`` says whether tensors have the elements that they have now.

    Of tensors elsewhere than on the CPU, which nobody must wait for, the versions are compared.

    Args:
        *tensors: integers or booleans, of at most one dimension, whose memory stays where it is while the snapshot is
            in use.
    """
    if not all(tensor.is_cpu for tensor in tensors):
        return _Versions(tensors)
    if _cpu_form() is reference:
        return _Copies(tensors)
    from .cpu.snapshot import Snapshot

    return Snapshot(*tensors)


class _Versions:
    """What ``cpu.snapshot.Snapshot`` is, for tensors whose elements are not looked at."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._seen = [tensor._version for tensor in tensors]

    def holds(self) -> bool:
        return [tensor._version for tensor in self._tensors] == self._seen


class _Copies:
    """What ``cpu.snapshot.Snapshot`` is, without compiled code."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pairs = [(tensor, tensor.clone()) for tensor in tensors]

    def holds(self) -> bool:
        return all(torch.equal(now, kept) for now, kept in self._pairs)


def marked(y: torch.Tensor, made: Any, block_size: tuple[int, ...], grid: Grid, form: Any) -> torch.Tensor:
    """Return a result, with a note for ``saved_as_codes`` where that is in force and the form can encode."""
    if y.requires_grad and marking(y) and hasattr(form, "encode"):
        mark(y, CodesOnDemand(y, made, block_size, grid, form))
    return y


def is_exporting() -> bool:
    """``torch.compiler.is_exporting``, for which torch 2.11 reads True wherever ``torch.compile`` traces it."""
    return torch.compiler._is_exporting_flag


def form_for(x: torch.Tensor, zero_point: torch.Tensor | None) -> Any:
    """``form_of``; zero points between the codes, as one may learn them, are for the reference."""
    if zero_point is not None and zero_point.dtype.is_floating_point:
        return reference
    return form_of(x)


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """Quantize and dequantize a tensor; the gradient passes straight through inside the grid's range.

    Args:
        x: tensor of any shape, floating point.
        scale: one entry per block in row-major order, or a single one; gets no gradient.
        zero_point: like ``scale``, or None for 0; the ``"zp"`` formulation of integers uses it.
        minval: like ``scale``; the ``"minval"`` formulation uses it.
        block_size: shape of one block; divides the shape of ``x``.
        grid: the codes.

    Returns:
        Tensor of the shape and dtype of ``x``; the arithmetic is float32 (``kernels.reference``).

    Raises:
        ValueError: blocks do not divide, or a parameter does not fit or is missing.
    """
    if is_compiling() or is_exporting():
        if is_exporting():
            from .operators import exported_fake_quantize

            return exported_fake_quantize(x, scale, zero_point, minval, block_size, grid)
        return reference.fake_quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)
    form = form_for(x, zero_point)
    y: torch.Tensor = form.fake_quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)
    return marked(y, (scale, zero_point, minval), block_size, grid, form)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """Return the quantized values as float32: whole numbers, or values that a float format represents.

    Takes the arguments of ``fake_quantize``. No gradient is recorded.

    Raises:
        ValueError: as ``fake_quantize``.
    """
    form = reference if is_compiling() else form_for(x, zero_point)
    with torch.no_grad():
        codes: torch.Tensor = form.quantize(x, scale, zero_point, minval, block_size=block_size, grid=grid)
    return codes


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the values that quantized values stand for, as ``output_dtype``.

    Args:
        codes: what ``quantize`` returned, in any dtype that holds it (``int8``, ``uint8``, FP8, floating point).
        scale: as in ``fake_quantize``.
        zero_point: as in ``fake_quantize``.
        minval: as in ``fake_quantize``.
        block_size: as in ``fake_quantize``.
        grid: as in ``fake_quantize``.
        output_dtype: dtype of the result; the arithmetic is float32. No gradient is recorded.

    Raises:
        ValueError: as ``fake_quantize``.
    """
    with torch.no_grad():
        values = codes.to(torch.float32)
        fused = not is_compiling() and output_dtype in _FLOATS
        form = form_for(values, zero_point) if fused else reference
        result: torch.Tensor = form.dequantize(
            values, scale, zero_point, minval, block_size=block_size, grid=grid, output_dtype=output_dtype
        )
    return result


def min_max(x: torch.Tensor, block_size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest element of every block; a NaN makes both NaN.

    Args:
        x: tensor of any shape.
        block_size: shape of one block; divides the shape of ``x``.

    Returns:
        Two tensors of the dtype of ``x`` and of shape ``x.shape // block_size``. A block without elements gives 0.

    Raises:
        ValueError: blocks do not divide.
    """
    form = reference if is_compiling() else form_of(x)
    result: tuple[torch.Tensor, torch.Tensor] = form.min_max(x, block_size)
    return result


def choose_qparams(
    min_val: torch.Tensor,
    max_val: torch.Tensor,
    *,
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return float32 scale, int32 zero point and float32 minval for a range (the formulas: ``kernels.reference``).

    Args:
        min_val: smallest value of each block; its dtype is the one computed in.
        max_val: largest value of each block, same shape and dtype.
        grid: the codes.
        scheme: ``"symmetric"``, ``"asymmetric"`` or ``"symmetric_with_clipping"`` (the grid holds the clipped range).
        scale_dtype: None, or ``torch.float8_e8m0fnu`` for power-of-two scales of float formats.

    Returns:
        Tensors in the shape of ``min_val``; zero point and minval are None for float formats.

    Raises:
        ValueError: unknown scheme, or one that the format does not take, or ranges of different shapes.
    """
    reference.check_scheme(grid, scheme, scale_dtype)
    if min_val.shape != max_val.shape:
        raise ValueError(
            f"min_val has shape {tuple(min_val.shape)} and max_val {tuple(max_val.shape)}; give one entry per block."
        )
    form = reference if is_compiling() or max_val.dtype != min_val.dtype else form_of(min_val)
    result: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = form.choose_qparams(
        min_val, max_val, grid=grid, scheme=scheme, scale_dtype=scale_dtype
    )
    return result


def observe_and_fake_quantize(
    x: torch.Tensor,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Find every block's range, choose its parameters, and fake-quantize with them.

    Args:
        x: tensor of any shape, floating point.
        block_size: shape of one block; divides the shape of ``x``.
        grid: the codes.
        scheme: as in ``choose_qparams``.
        scale_dtype: as in ``choose_qparams``.

    Returns:
        The fake-quantized tensor with its straight-through gradient, scale, zero point and minval.

    Raises:
        ValueError: as ``min_max`` and ``choose_qparams``.
    """
    reference.check_scheme(grid, scheme, scale_dtype)
    if is_compiling() or is_exporting():
        low, high = reference.min_max(x, block_size)
        made = reference.choose_qparams(low, high, grid=grid, scheme=scheme, scale_dtype=scale_dtype)
        return fake_quantize(x, *made, block_size=block_size, grid=grid), *made
    form = form_of(x)
    y, *made = form.observe_and_fake_quantize(
        x, block_size=block_size, grid=grid, scheme=scheme, scale_dtype=scale_dtype
    )
    return marked(y, tuple(made), block_size, grid, form), *made


def observe_running_and_fake_quantize(
    x: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    *,
    block_size: tuple[int, ...],
    grid: Grid,
    scheme: str,
    scale_dtype: torch.dtype | None = None,
    averaging_constant: float | None = None,
    restart: bool = False,
    quantize: bool = True,
) -> torch.Tensor:
    """Widen a running range by a tensor, choose the parameters from it, and fake-quantize with them.

    The running range and the parameters are changed in place.

    Args:
        x: tensor of any shape, floating point.
        running_min: smallest element of each block so far, in the dtype of ``x`` or float32, in which it is averaged.
        running_max: largest element of each block so far, likewise.
        scale: where the float32 scales go.
        zero_point: where the int32 zero points go; None for float formats.
        minval: where the float32 minvals go; None for float formats.
        block_size: shape of one block; divides the shape of ``x``.
        grid: the codes.
        scheme: as in ``choose_qparams``.
        scale_dtype: as in ``choose_qparams``.
        averaging_constant: weight ``c`` of this tensor in ``running = c * new + (1 - c) * running``; None keeps the
            extremes of all tensors.
        restart: forget the running range and take this tensor's.
        quantize: False observes only.

    Returns:
        The fake-quantized tensor with its straight-through gradient, or ``x`` itself.

    Raises:
        ValueError: as ``min_max`` and ``choose_qparams``, or a running range of another shape or dtype.
    """
    reference.check_scheme(grid, scheme, scale_dtype)
    form = reference if is_compiling() else form_of(x)
    y: torch.Tensor = form.observe_running_and_fake_quantize(
        x, running_min, running_max, scale, zero_point, minval,
        block_size=block_size, grid=grid, scheme=scheme, scale_dtype=scale_dtype,
        averaging_constant=averaging_constant, restart=restart, quantize=quantize,
    )  # fmt: skip
    return marked(y, (scale, zero_point, minval), block_size, grid, form) if quantize else y
