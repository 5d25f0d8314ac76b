"""Simulators on function calls of eager models.

A module that *is* one op (``nn.Linear``) gets an :class:`OpScope` around its forward. A module that calls functions
itself (``x + y``, ``torch.matmul``) becomes a frame: while it runs, a torch function mode counts its calls by function
name and routes the planned ones through their simulators. Where control flow differs from that of planning, the places
of the calls in the code say which ones were left out or are new. Modules called from a frame run in an empty frame, so
that their own calls are neither counted nor touched. The mode is active while a thread has frames.

Scopes hold plain data and find their simulators among the children of their module, so that models can be copied and
pickled.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitwright._utils.call_frames import calling_code, is_in_branch, run_by_itself, shielded, thread_frames
from bitwright._utils.direct_calls import Caller, caller, pass_last, pass_through
from bitwright._utils.forward_scope import ForwardScope
from bitwright.errors import UnplannedCallWarning
from bitwright.kernels.dispatch import is_exporting
from bitwright.kernels.remade import forget_weight
from bitwright.planning.ops import QUANTIZER_EAGER_OPS
from bitwright.program.aten_names import is_in_place
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .bookkeeping import QUESTIONS, Bookkeeping
from .guesses import BeforeGuess
from .recompute import checkpoint_here, repeat_with

_DYNAMO = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")
_count_modes, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at

__all__ = ["CallSites", "CallTable", "FrameScope", "OpScope", "ShieldScope", "UnreachedScope"]


@dataclass(slots=True)
class CallSites:
    """Simulators of one call.

    Attributes:
        arguments: ``(position, name, item in a list or None, child name of the simulator)``.
        outputs: ``(position among the output's tensors, child name of the simulator)``.
        in_place: whether the function writes to its first argument.
    """

    in_place: bool = False
    arguments: list[tuple[int, str, int | None, str]] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def of(cls, base: str) -> CallSites:
        """Return those of a function by its name, without simulators yet."""
        return cls(is_in_place(base))


@dataclass(slots=True)
class CallTable:
    """The planned calls of one module.

    Attributes:
        path: module path, for messages.
        seen: calls of each function name while planning.
        sites: simulators by call name (``"add_1"``).
        written_in: by function name, where each of its calls stands in the code, in their order.
        foreign: calls by function name and place that were taken for planned ones and are none.
        once: calls by function name and place that compute constants, which the model keeps for inputs of one size.
        warned: call names that were already reported.
        unreached: whether preparing has not come to the module at all, which is reported once, whatever it calls.
    """

    path: str
    seen: dict[str, int] = field(default_factory=dict)
    sites: dict[str, CallSites] = field(default_factory=dict)
    written_in: dict[str, list[tuple[str, int] | None]] = field(default_factory=dict)
    foreign: set[tuple[str, tuple[str, int]]] = field(default_factory=set)
    once: set[tuple[str, tuple[str, int]]] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    unreached: bool = False

    def find(self, base: str, code: tuple[str, int], counted: int, certain: int) -> tuple[int | None, bool]:
        """Return the number of a call, None for one that was not planned, and whether its place in the code says so.

        A planned place has its own number, whatever ran before it. An unknown place in a function that was planned may
        be another spelling of what comes next, unless that came behind it once; one in another function is a call of
        its own.

        Args:
            base: name of the called function.
            code: where the call stands.
            counted: calls of this function so far.
            certain: number that follows the last one that was certain.
        """
        planned = self.written_in.get(base)
        if not planned:
            return counted, False
        if counted < len(planned) and planned[counted] == code:
            return counted, True
        if code in planned:
            return (planned.index(code, certain) if code in planned[certain:] else None), True
        known = any(call is None or call[0] == code[0] for calls in self.written_in.values() for call in calls)
        return (counted, False) if known and (base, code) not in self.foreign else (None, False)


class _Frame:
    __slots__ = ("apart", "before", "certain", "checkpoint", "counts", "guessed", "module", "records", "table")

    def __init__(
        self,
        table: CallTable,
        module: nn.Module,
        counts: Mapping[str, int] | None = None,
        certain: Mapping[str, int] | None = None,
    ) -> None:
        self.table = table
        self.module = module
        self.counts: dict[str, int] = dict(counts or {})
        self.certain: dict[str, int] = dict(certain or {})
        #: Where the calls stand that may be others than the planned ones whose numbers they have.
        self.guessed: dict[tuple[str, int], tuple[str, int]] = {}
        #: What the simulators of those calls held until then.
        self.before: dict[tuple[str, int], BeforeGuess] = {}
        #: The checkpoint within which the frame begins; it repeats the frame as a whole.
        self.checkpoint = checkpoint_here(module.training)
        #: Whether gradients are recorded where the frame begins, so that a call without them stands apart.
        self.records = module.training and torch.is_grad_enabled() and not is_dynamo_compiling()
        self.apart: Bookkeeping | None = None

    def run_apart(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], base: str) -> Any:
        """Run a call that planning has not seen, in a part of a training forward that records no gradients.

        It meets no simulator. Most likely it keeps statistics; whether its result is used otherwise is watched.
        """
        result = func(*args, **kwargs)
        if self.apart is None:
            self.apart = Bookkeeping(self.module)
        known = base in self.table.seen or base in QUANTIZER_EAGER_OPS
        own = base if known and _may_be_reported(self.table, base, (args, kwargs)) else None
        self.apart.note(own, (args, kwargs), args[0] if result is None and args else result)
        return result

    def report_used(self, arguments: Any) -> None:
        """Warn of calls that stood apart, if any of ``arguments`` comes from them after all."""
        if self.apart:
            with torch._C.DisableTorchFunction():  # the mode may be in force here
                for base in self.apart.used_by(arguments):
                    _report_unplanned(self.table, base, arguments, training=True)

    def note_checkpoint(self) -> None:
        """Have a checkpoint that began within the frame repeat its function in a frame that goes on from here."""
        checkpoint = checkpoint_here(self.module.training)
        if checkpoint is not None and checkpoint is not self.checkpoint:
            counts, certain = dict(self.counts), dict(self.certain)
            repeat_with(checkpoint, partial(_Repeated, self.table, self.module, counts, certain))

    def stands_apart(self, base: str, code: tuple[str, int] | None) -> bool:
        """Whether a call that records no gradients is none of the planned ones.

        A reentrant checkpoint records none at first either, and repeats its calls with gradients.
        """
        if code is None or code in self.table.written_in.get(base, ()):
            return False
        return checkpoint_here(training=True) is None

    def number(self, base: str, code: tuple[str, int] | None) -> int | None:
        """Return the number of a call of ``base`` that stands at ``code`` (None: nobody knows), None if not planned."""
        number = self.counts.get(base, 0)
        if code is not None:
            found, is_certain = self.table.find(base, code, number, self.certain.get(base, 0))
            if is_certain and self.guessed:
                self._correct(base, found, code)
            if found is None:
                return None
            number = found
            if is_certain:
                self.certain[base] = number + 1
            else:
                self.guessed[base, number] = code
                self.before[base, number] = BeforeGuess(self._simulators(base, number))
        self.counts[base] = number + 1
        return number

    def _simulators(self, base: str, number: int) -> list[nn.Module]:
        """Return those of a call by its number."""
        sites = self.table.sites.get(_call_name(base, number), CallSites())
        names = [*(child for *_, child in sites.arguments), *(child for _, child in sites.outputs)]
        return [module for name in names if (module := self.module._modules[name]) is not None]

    def _correct(self, base: str, number: int | None, code: tuple[str, int]) -> None:
        """Note which calls were taken for the planned one that is there now, or for later ones.

        Args:
            base: name of the called function.
            number: which of its calls is there; None if all that are planned at ``code`` have been.
            code: where it stands.
        """
        planned = self.table.written_in[base]
        places = {
            guess: place
            for (name, guess), place in self.guessed.items()
            if name == base and (guess >= number if number is not None else planned[guess : guess + 1] == [code])
        }
        if not places:
            return
        for guess, place in places.items():
            del self.guessed[base, guess]
            self.before.pop((base, guess)).give_back()
            self.table.foreign.add((base, place))
        thread_frames.corrections += 1
        functions = ", ".join(dict.fromkeys(place[0] for place in places.values()))
        _warn_of_unplanned(
            self.table,
            base,
            f"in {functions} was not seen while preparing, and was taken for one further on, which has come now. It "
            "runs unquantized from now on; what torch.export captures just now, it should capture again. "
            f"{_IN_TRAINING if self.module.training else _EXCLUDE}",
        )


class _Repeated:
    """A function that is computed again, with the frame that it had at first."""

    def __init__(
        self,
        table: CallTable,
        module: nn.Module,
        counts: Mapping[str, int],
        certain: Mapping[str, int],
        function: Callable[..., Any],
    ) -> None:
        self._frame = table, module, counts, certain
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _in_frame(_Frame(*self._frame), self._function, args, kwargs)


def _in_frame(frame: _Frame, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    frames = thread_frames
    frames.stack.append(frame)
    try:
        if frames.mode is not None or (is_dynamo_compiling() and _is_in_force()):
            return run(*args, **kwargs)
        with _InterceptMode() as mode:
            frames.mode = mode
            try:
                return run(*args, **kwargs)
            finally:
                frames.mode = None
    finally:
        frames.stack.pop()


def _is_in_force() -> bool:
    """Whether the mode is on the stack; for ``torch.compile``, which may have lost what ``frames.mode`` was set to."""
    return any(isinstance(_mode_at(place), _InterceptMode) for place in range(_count_modes()))


class _InterceptMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        frame = thread_frames.stack[-1]
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if frame is None or (tracing and _computes_sizes(args)) or is_in_branch():
            return func(*args, **(kwargs or {}))
        base = str(func.__name__)  # torch.compile knows a name only after that
        table = frame.table
        if frame.records:
            if not torch.is_grad_enabled() and frame.stands_apart(base, calling_code()):
                return frame.run_apart(func, args, kwargs or {}, base)
            if frame.apart and base not in QUESTIONS:
                frame.report_used((args, kwargs))
        if table.once and (base, calling_code()) in table.once:
            return func(*args, **(kwargs or {}))
        planned = table.seen.get(base)
        if planned is None:
            if base in QUANTIZER_EAGER_OPS:
                _report_unplanned(table, base, (args, kwargs), frame.module.training)
            return func(*args, **(kwargs or {}))
        frame.note_checkpoint()
        number = frame.number(base, calling_code())
        if number is None:
            _report_unplanned(table, base, (args, kwargs), frame.module.training)
            return func(*args, **(kwargs or {}))
        call = _call_name(base, number)
        sites = table.sites.get(call)
        if sites is None:
            if number >= planned:
                _report_unplanned(table, call, (args, kwargs), frame.module.training)
            return func(*args, **(kwargs or {}))
        return _run(frame.module, sites, func, list(args), dict(kwargs or {}))


# Where torch.compile breaks its graph and a module runs as it is, it would compile this method by itself for one getter
# of a tensor's attributes, and not ask later whether that is the getter called: x.device would be what x.dtype is.
run_by_itself(_InterceptMode.__torch_function__)


def _call_name(base: str, number: int) -> str:
    return f"{base}_{number}" if number else base


def _computes_sizes(args: Sequence[Any]) -> bool:
    """Whether a call computes with sizes, which are tensors while ``torch.jit.trace`` runs, and numbers otherwise."""
    tensors = [entry for entry in args if isinstance(entry, torch.Tensor)]
    return bool(tensors) and all(tensor.dim() == 0 and not tensor.is_floating_point() for tensor in tensors)


def _run(module: nn.Module, sites: CallSites, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    children, call = module._modules, caller()
    target: Any = args[0] if args and sites.in_place else kwargs.get("out")
    for index, name, item, child in sites.arguments:
        simulate: Any = children[child]
        holder, key = _slot(args, kwargs, index, name)
        entry = holder.get(key) if isinstance(holder, dict) else holder[key]
        if item is not None and isinstance(entry, (list, tuple)):
            if item < len(entry) and isinstance(entry[item], torch.Tensor):
                changed = [*entry[:item], simulate(entry[item]), *entry[item + 1 :]]
                holder[key] = changed if isinstance(entry, list) else tuple(changed)
        elif isinstance(entry, torch.Tensor):
            overwritten = entry is target and entry.requires_grad
            holder[key] = call(simulate, entry.clone() if overwritten and simulate.keeps_input() else entry)
    held = [func(*args, **kwargs)]
    forget_weight(held[0])
    if not isinstance(target, torch.Tensor):
        return _simulate_outputs(held, sites.outputs, children, call)
    result = held.pop()
    if result is None:
        result = args[0]  # what `x[0] = y` wrote to
    for index, child in sites.outputs:
        simulate = children[child]
        if isinstance(result, torch.Tensor) and result.requires_grad and simulate.keeps_input():
            result = result.clone()  # `target` will be overwritten
        result = _replace_output(result, index, simulate)
    if result is not target:
        traced = torch._C._get_tracing_state() is not None
        if traced and not any(isinstance(children[child], FakeQuantizeImplBase) for _, child in sites.outputs):
            return _become(target, result)
        return target.copy_(result)  # the caller may hold `x` of `x.add_(y)` under other names
    return result


def _become(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Give ``target`` the numbers of ``result``, and let it be ``result`` in the trace that is made.

    That is for traces of what was finalized for Core ML: coremltools has copies into selections and slices only, and
    whoever reads ``target`` behind a copy reads what that returned anyway.
    """
    tracer: Any = torch._C
    state, value = tracer._get_tracing_state(), tracer._get_value_trace(result)
    tracer._set_tracing_state(None)
    try:
        target.copy_(result)
    finally:
        tracer._set_tracing_state(state)
    tracer._set_value_trace(target, value)
    return target


def _simulate_outputs(
    held: list[Any], outputs: Sequence[tuple[int, str]], children: Mapping[str, Any], call: Caller
) -> Any:
    """Return a result with its simulated outputs; it is taken out of ``held``, so that nobody else need hold it."""
    result = held.pop()
    if not outputs:
        return result
    call_last = pass_last if call is pass_through else call
    for index, child in outputs:
        if type(result) is torch.Tensor and index == 0:
            result = call_last(children[child], result)
        else:
            result = _replace_output(result, index, children[child])
    return result


def _slot(args: list[Any], kwargs: dict[str, Any], index: int, name: str) -> tuple[Any, Any]:
    """Return the container of an argument, and its key there."""
    return (args, index) if index < len(args) else (kwargs, name)


def _replace_output(result: Any, index: int, simulate: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return simulate(result) if index == 0 else result
    if isinstance(result, (tuple, list)) and index < len(result) and isinstance(result[index], torch.Tensor):
        changed = [*result[:index], simulate(result[index]), *result[index + 1 :]]
        if hasattr(result, "_fields"):
            return type(result)(*changed)
        if hasattr(result, "n_fields"):  # what torch.topk and its like return takes one sequence
            return type(result)(changed)
        return tuple(changed) if isinstance(result, tuple) else changed
    return result


def _may_be_reported(table: CallTable, call: str, arguments: Any) -> bool:
    """Whether a call reads floating-point data; others, such as positions, are not quantized anyway."""
    reported = bool(table.warned) if table.unreached else call in table.warned
    return not reported and _reads_floats(arguments)


_EXCLUDE = "Prepare with example inputs that take this path, or exclude the module in the config."
_IN_TRAINING = (
    "Preparing runs the model in eval mode. If the call is made in training only, as that of an auxiliary head, it is "
    "no part of the model that is exported, and all is well: ignore bitwright.errors.UnplannedCallWarning. If eval "
    "mode makes it too, prepare with example inputs that take this path, or exclude the module in the config."
)


def _report_unplanned(table: CallTable, call: str, arguments: Any, training: bool) -> None:
    """Warn once of a call on floating-point data."""
    if not _may_be_reported(table, call, arguments) or _is_compiled_code():
        return
    remedy = _IN_TRAINING if training else _EXCLUDE
    if is_exporting():
        remedy = (
            "It came while torch.export captured the model: some models take another path there, for example add an "
            "attention mask that they make for export only. To have one path, pass the mask as an input in both."
        )
    elif torch._C._are_functorch_transforms_active():
        remedy = "It runs inside torch.vmap or its like, where no simulator sees whole tensors; in a loop it would."
    _warn_of_unplanned(table, call, f"was not seen while preparing, so it runs unquantized. {remedy}")


def _warn_of_unplanned(table: CallTable, call: str, what: str) -> None:
    table.warned.add(call)
    name = f"{table.path}.{call}" if table.path else call
    subject = f"module {table.path!r}" if table.unreached else f"call {name!r}"
    warnings.warn(f"The {subject} {what}", UnplannedCallWarning, stacklevel=5)


def _is_compiled_code() -> bool:
    """Whether a call comes from what ``torch.compile`` made of a module inside the frame, simulators and all."""
    if is_dynamo_compiling():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _in_frame.__code__:
        if frame.f_code.co_filename == _DYNAMO:
            return True
        frame = frame.f_back
    return False


def _reads_floats(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in tree_leaves(arguments))


def _enter_child(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the frame around a module what the module is given, where the frame waits for that."""
    frame = thread_frames.stack[-1]
    if frame is not None and frame.apart:
        frame.report_used((args, kwargs))


class OpScope(ForwardScope):
    """Simulators on the arguments and outputs of a module that is one op.

    Attributes:
        inputs: ``(position, parameter name, child name of the simulator)``.
        outputs: ``(position, child name of the simulator)``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.inputs: list[tuple[int, str, str]] = []
        self.outputs: list[tuple[int, str]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_branch():
            return self.run(*args, **kwargs)
        if thread_frames.stack:
            _enter_child(args, kwargs)
            return shielded(self._simulate, args, kwargs)
        return self._simulate(args, kwargs)

    def _simulate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.module
        children: Any = module._modules
        call = caller()
        for index, name, child in self.inputs:
            if index < len(args):
                args = (*args[:index], call(children[child], args[index]), *args[index + 1 :])
            elif name in kwargs:
                kwargs[name] = call(children[child], kwargs[name])
        inner = self.inner
        held = [type(module).forward(module, *args, **kwargs) if inner is None else inner(*args, **kwargs)]
        forget_weight(held[0])
        return _simulate_outputs(held, self.outputs, children, call)


class FrameScope(ForwardScope):
    """Routes the planned calls of a module's own forward through its simulators."""

    def __init__(self, module: nn.Module, table: CallTable) -> None:
        super().__init__(module)
        self.table = table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_branch():
            return self.run(*args, **kwargs)
        if thread_frames.stack:
            _enter_child(args, kwargs)
        frame = _Frame(self.table, self.module)
        result = _in_frame(frame, self.run, args, kwargs)
        if frame.apart:
            frame.report_used(result)
        return result


class UnreachedScope(FrameScope):
    """Reports, by a table without calls, that a module runs which preparing has not come to.

    Where no gradients are recorded in training it most likely keeps statistics, which the frame around it looks at.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_branch():
            return self.run(*args, **kwargs)
        if self.table.warned:
            return shielded(self.run, *args, **kwargs)
        if self.module.training and not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class ShieldScope(ForwardScope):
    """Keeps the calls made inside a module from being taken for calls of the frame around it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_branch():
            return self.run(*args, **kwargs)
        if thread_frames.stack:
            _enter_child(args, kwargs)
        return shielded(self.run, *args, **kwargs)
