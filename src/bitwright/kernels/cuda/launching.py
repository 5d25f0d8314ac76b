"""Launches of compiled kernels that spare Triton's look at every argument, which takes longer than small tensors do."""

from __future__ import annotations

import logging
from typing import Any

import torch
import triton

__all__ = ["launch"]

_logger = logging.getLogger(__name__)

_MOST_KEPT = 4096
_ALIGNMENT = 16  # bytes; Triton compiles code of its own for pointers that are not multiples of it
# A fused multiply-add rounds once where the reference rounds twice.
_EXACT = {"enable_fp_fusion": False}

_kept: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_keeps = True


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[Any, ...],
    warps: int,
    **constants: Any,
) -> None:
    """Launch a kernel on the device of its tensors.

    What Triton compiled for the same kinds of tensors and the same numbers is called again directly.

    Args:
        kernel: a jitted function whose parameters are pointers, then numbers, then constants.
        programs: size of the grid.
        tensors: for the pointers; all on one device.
        numbers: for the numbers.
        warps: warps of a program.
        **constants: by name.
    """
    first = tensors[0]
    if not first.is_cuda:  # Triton's interpreter
        kernel[(programs,)](*tensors, *numbers, **constants, **_EXACT)
        return
    device = first.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, tensors, numbers, warps, **constants)
        return
    key = (kernel.__name__, device, tuple([t.dtype for t in tensors]), numbers, tuple(constants.values()))
    known = _kept.get(key)
    if known is not None:
        for tensor in tensors:
            if tensor.data_ptr() % _ALIGNMENT:
                break
        else:
            compiled, rest = known
            compiled[programs, 1, 1](*tensors, *numbers, *rest)
            return
    made = kernel[(programs,)](*tensors, *numbers, **constants, num_warps=warps, **_EXACT)
    if known is None and _keeps and all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors):
        _keep(key, kernel, made, constants, len(tensors) + len(numbers))


def _keep(key: tuple[Any, ...], kernel: Any, made: Any, constants: dict[str, Any], others: int) -> None:
    """Keep a compiled kernel, where this version of Triton has launched with one that can be called as it is here."""
    global _keeps
    if not isinstance(made, triton.compiler.CompiledKernel) or set(constants) != set(kernel.arg_names[others:]):
        _keeps = False
        _logger.info("Triton %s launches every kernel anew.", triton.__version__)
        return
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[key] = made, tuple(constants[name] for name in kernel.arg_names[others:])
