"""Launches of compiled kernels that spare Triton's look at every argument, which takes longer than small tensors do."""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any, NamedTuple

import torch
import triton

__all__ = ["Lasting", "Launch"]

_logger = logging.getLogger(__name__)

_ALIGNMENT = 16  # bytes; Triton compiles code of its own for pointers that are not multiples of it
# A fused multiply-add rounds once where the reference rounds twice.
_EXACT = {"enable_fp_fusion": False}

_keeps = True
# Kernels load and store bfloat16 as int16, so that the rounding is theirs everywhere.
_STORED = {torch.bfloat16: torch.int16}
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _is_watched() -> bool:
    """Whether somebody, such as a profiler, has hooks called at every launch, which is left to Triton then."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


class Lasting(NamedTuple):
    """Tensors that lie where they are from launch to launch, so that their addresses are asked for once.

    Attributes:
        tensors: the tensors.
        addresses: theirs.
        together: all addresses, bit by bit.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    addresses: tuple[int, ...] = ()
    together: int = 0

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Lasting:
        """Ask for the addresses."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        return cls(tensors, addresses, functools.reduce(operator.or_, addresses, 0))


_NONE = Lasting()


class Launch:
    """A kernel with the numbers and constants of one kind of call.

    What Triton compiled for a device is launched again directly.

    Args:
        kernel: a jitted function whose parameters are pointers, then numbers, then constants.
        programs: size of the grid.
        numbers: for the numbers.
        warps: warps of a program.
        **constants: by name. They and the numbers determine the dtypes that the pointers are to.
    """

    __slots__ = ("_constants", "_kernel", "_known", "_numbers", "_programs", "_warps")

    def __init__(self, kernel: Any, programs: int, numbers: tuple[Any, ...], warps: int, **constants: Any) -> None:
        self._kernel, self._programs, self._numbers = kernel, programs, numbers
        self._warps, self._constants = warps, constants
        self._known: dict[int, tuple[Any, ...]] = {}

    def __call__(self, *tensors: torch.Tensor, lasting: Lasting = _NONE) -> None:
        """Launch on the device of the tensors.

        Args:
            *tensors: for the first pointers; all on one device.
            lasting: for the other pointers, on that device too.
        """
        first = tensors[0]
        if not first.is_cuda:  # Triton's interpreter
            self._launch_anew((*tensors, *lasting.tensors), {})
            return
        device = first.get_device()
        if device != _current_device():
            with torch.cuda.device(device):
                self(*tensors, lasting=lasting)
            return
        addresses, together = [tensor.data_ptr() for tensor in tensors], lasting.together
        for address in addresses:
            together |= address
        if together % _ALIGNMENT == 0:
            known = self._known.get(device)
            if known is not None and not _is_watched():
                run, function, metadata, rest = known
                stream, last = _stream(device), lasting.addresses
                run(self._programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *last, *rest)
                return
        made = self._launch_anew((*tensors, *lasting.tensors), {"num_warps": self._warps})
        if together % _ALIGNMENT == 0 and _keeps:
            self._keep(device, len(tensors) + len(lasting.tensors), made)

    def _launch_anew(self, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
        stored = [tensor.view(_STORED.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
        return self._kernel[(self._programs,)](*stored, *self._numbers, **self._constants, **options, **_EXACT)

    def _keep(self, device: int, pointers: int, made: Any) -> None:
        """Keep a compiled kernel, where this version of Triton launches one as it is done here."""
        global _keeps
        names = self._kernel.arg_names[pointers + len(self._numbers) :]
        parts = [getattr(made, name, None) for name in ("run", "function", "packed_metadata")]
        if (
            None in parts
            or _stream is None
            or not isinstance(made, triton.compiler.CompiledKernel)
            or set(self._constants) != set(names)
        ):
            _keeps = False
            _logger.info("Triton %s launches every kernel anew.", triton.__version__)
            return
        self._known[device] = (*parts, (*self._numbers, *[self._constants[name] for name in names]))
