"""Fake quantization of many small tensors by one call of machine code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from . import dispatch, reference
from .grid import Grid
from .layout import SMALL, layout_of
from .saved import marking
from .straight_through import Backward

__all__ = ["LARGEST", "LARGEST_OF_MANY", "Task", "fake_quantize_many", "quantized_small"]

Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# Larger tensors are left to the kernels for one tensor, which do not observe anew what has not changed. Above the
# second number of elements company brings no gain: until a tensor is used it has left the cache.
LARGEST = 1 << 20
LARGEST_OF_MANY = 1 << 14

_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_grad_enabled = torch.is_grad_enabled


class Task:
    """How one of the tensors of ``fake_quantize_many`` is quantized; keep it for the next call, it prepares itself.

    Args:
        made: scale, zero point and minval as ``fake_quantize`` takes them.
        block_size: shape of one block; divides the shape of the tensor.
        grid: the codes.
        scheme: see ``choose_qparams``. The range of every block is found and its parameters are written to ``made``,
            in place: float32, int32, float32, one entry per block. None takes them as they are.
        scale_dtype: see ``choose_qparams``.

    Raises:
        ValueError: a scheme that the format does not take.
    """

    __slots__ = ("_latest", "block_size", "grid", "made", "scale_dtype", "scheme")

    def __init__(
        self,
        made: Parameters,
        block_size: tuple[int, ...],
        grid: Grid,
        scheme: str | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> None:
        if scheme is not None:
            reference.check_scheme(grid, scheme, scale_dtype)
        self.made, self.block_size, self.grid = made, block_size, grid
        self.scheme, self.scale_dtype = scheme, scale_dtype
        # The kind of tensor and the call for it change together: other threads may quantize tensors of other kinds.
        self._latest: tuple[tuple[Any, ...], Any] = ((), None)

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Fake-quantize one tensor by a prepared call; None if there is none for such tensors.

        No mode or transform of torch is in force (``dispatch.undisturbed``).
        """
        call = self._prepared(x)
        if call is None:
            return None
        y: torch.Tensor = call.run(x)
        return self._marked(y) if marking(y) else y

    def run_masked(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Backward] | None:
        """``run`` without recording a gradient; returns what one is made with too, see ``straight_through``."""
        call = self._prepared(x)
        return None if call is None else call.run_masked(x)

    @property
    def again(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The prepared call for a tensor like the last, without observing or a gradient; None for a small one."""
        return getattr(self._latest[1], "again", None)

    def _prepared(self, x: torch.Tensor) -> Any:
        """The prepared call for a plain tensor, on the CPU one of at most ``LARGEST`` elements; None for any other."""
        if type(x) not in _PLAIN or not (x.is_cpu or x.is_cuda) or x.layout is not _STRIDED or x.is_neg():
            return None
        scale, zero_point, minval = self.made
        key = (
            x.dtype,
            x.get_device(),
            x.shape,
            x.stride(),
            scale.data_ptr(),
            None if zero_point is None else zero_point.data_ptr(),
            None if minval is None else minval.data_ptr(),
        )
        latest = self._latest
        if key != latest[0]:
            self._latest = latest = key, self._prepare(x)
        return latest[1]

    def _prepare(self, x: torch.Tensor) -> Any:
        zero_point, observed = self.made[1], self.scheme is not None
        if dispatch.form_of(x) is reference or (zero_point is not None and zero_point.is_floating_point()):
            return None
        blocks = layout_of(x.shape, None, self.block_size).blocks
        if observed and self.made[0].numel() == 1 != blocks:
            raise ValueError(f"One scale cannot hold what is chosen for {blocks} blocks.")
        if x.is_cpu and x.numel() < SMALL:
            from .cpu import many

            fits = many.suits(x, self.made, observed) and _has_no_holes(x)
            how = self.block_size, self.grid, self.scheme, self.scale_dtype
            return many.SmallCall(x, self.made, *how) if fits else None
        if x.is_cpu and x.numel() > LARGEST:
            return None
        options = {"scheme": self.scheme, "scale_dtype": self.scale_dtype} if observed else {}
        ready = dispatch.ready_call(x, self.made, block_size=self.block_size, grid=self.grid, **options)
        return None if ready is None else FollowingCall(x, ready, self.made if observed else ())

    def _run_alone(self, x: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"block_size": self.block_size, "grid": self.grid}
        if self.scheme is None:
            return dispatch.fake_quantize(x, *self.made, **options)
        y, *made = dispatch.observe_and_fake_quantize(x, scheme=self.scheme, scale_dtype=self.scale_dtype, **options)
        for kept, new in zip(self.made, made, strict=True):
            if kept is not None and new is not None:
                kept.copy_(new.view(kept.shape))
        return y

    def _marked(self, y: torch.Tensor) -> torch.Tensor:
        """The result, with a note for ``saved_as_codes``."""
        return dispatch.marked(y, self.made, self.block_size, self.grid, dispatch.form_of(y))


class FollowingCall:
    """What ``cpu.many.SmallCall`` is, by a call prepared for tensors that are not small.

    Args:
        x: a tensor of the kind that the call is for.
        ready: the call, of ``dispatch.ready_call``.
        written: the parameters that it chooses anew for every tensor; none takes them as they are.
    """

    __slots__ = ("_ready", "_written")

    def __init__(self, x: torch.Tensor, ready: Any, written: Sequence[torch.Tensor | None]) -> None:
        self._ready = ready
        self._written = [t for t in written if t is not None]
        if x.numel() >= SMALL:
            ready.encodes = False  # weights of this size are made again instead (``remade``)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize a tensor; the gradient passes straight through where nothing is clipped."""
        observed = self._note_writing()
        if x.requires_grad and _grad_enabled():
            y: torch.Tensor = self._ready.run_with_gradient(x, observed=observed)
            return y
        return self._ready.observe_and_run(x, False) if observed else self.again(x)

    def run_masked(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Backward]:
        """Fake-quantize a tensor without recording a gradient; return its mask and what it does to a gradient too."""
        found: tuple[torch.Tensor, torch.Tensor, Backward] = self._ready.masked(x, self._note_writing())
        return found

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize a tensor without a gradient, with the parameters as they are."""
        y: torch.Tensor = self._ready.run(x)
        return y

    def _note_writing(self) -> bool:
        """Advance the versions of what the call is going to write; return whether there is any."""
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        return bool(self._written)


def _has_no_holes(x: torch.Tensor) -> bool:
    return x.is_contiguous() or torch.empty_like(x).stride() == x.stride()


def fake_quantize_many(tensors: Sequence[torch.Tensor], tasks: Sequence[Task]) -> list[torch.Tensor]:
    """Fake-quantize tensors; small ones on the CPU by one call of machine code, which shares them among the threads.

    Args:
        tensors: floating point, of any shapes.
        tasks: how each is quantized. No two write to the same parameters.

    Returns:
        Tensors of the shapes and dtypes of ``tensors``, with straight-through gradients. Those of small tensors come
        together, when all of them are there that a backward pass brings.

    Raises:
        ValueError: as ``fake_quantize`` and ``observe_and_fake_quantize``, or the lists are not of one length.
    """
    if len(tensors) != len(tasks):
        raise ValueError(f"Every tensor needs a task, got {len(tensors)} tensors and {len(tasks)} tasks.")
    results = quantized_small(tensors, tasks) if not is_compiling() else [None] * len(tensors)
    return [task._run_alone(x) if y is None else y for x, y, task in zip(tensors, results, tasks, strict=True)]


def quantized_small(tensors: Sequence[torch.Tensor], tasks: Sequence[Task]) -> list[torch.Tensor | None]:
    """``fake_quantize_many`` for those tensors for which a call can be prepared; None for any other."""
    results: list[torch.Tensor | None] = [None] * len(tensors)
    if not dispatch.undisturbed():
        return results
    groups: dict[bool, list[tuple[int, torch.Tensor, Any]]] = {False: [], True: []}
    recording = _grad_enabled()
    for place, (x, task) in enumerate(zip(tensors, tasks, strict=True)):
        call = task._prepared(x) if x.is_cpu and x.numel() <= LARGEST_OF_MANY else None
        if call is not None:
            groups[recording and x.requires_grad].append((place, x, call))
    for gradient, group in groups.items():
        if group:
            from .cpu.many import run_many

            places, small, calls = zip(*group, strict=True)
            for place, y in zip(places, run_many(small, calls, gradient), strict=True):
                results[place] = tasks[place]._marked(y) if marking(y) else y
    return results
