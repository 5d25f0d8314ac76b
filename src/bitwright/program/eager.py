"""Eager front end: one traced forward, recorded through a torch function mode and scopes around forwards."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitwright._utils.call_frames import calling_code
from bitwright._utils.forward_scope import ForwardScope, wrap_forward
from bitwright._utils.tensor_memory import memory_of
from bitwright.errors import TraceError

from .aten_names import is_in_place
from .export_errors import inputs_by_name
from .handed_out import HandedOut
from .kept_tensors import calls_of_constant, kept_tensors
from .masks import holds_mask
from .model import Argument, ModuleCall, Op, Program, StateTensor, Value, ValueKind, collect_states
from .protect import evaluated
from .signatures import argument_names
from .states import states_preserved

__all__ = ["trace_eager"]

_in_transform = torch._C._are_functorch_transforms_active


def trace_eager(
    model: nn.Module,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    on_op: Callable[[Op], None] | None = None,
    *,
    every_call: bool = False,
) -> Program:
    """Run ``model`` once in eval mode under ``no_grad`` and return what happened as a :class:`Program`.

    The ops of each module are recorded at its first call only; of later calls the boundary, as ``repeats``. The model,
    its statistics, what it keeps and the random state are as before. A model that computes a constant when it is first
    called, and keeps it, or registers layers or tensors then, runs once more: it will not make those calls again. The
    modules that do so keep their attributes, and those that write to parameters, which are not put back either.

    Args:
        model: the model.
        example_inputs: positional inputs.
        example_kwargs: keyword inputs.
        on_op: called with every recorded op while it runs.
        every_call: record the ops of later calls too, under the names of the first one's.

    Raises:
        TraceError: the model's forward raised; the error names the innermost module and keeps the cause.
    """
    computed_once: list[Op] = []
    keeping = set[int]()
    for calls in range(2):
        with states_preserved(model, but=keeping):
            tracer, kept = _Tracer(model, on_op, every_call), kept_tensors(model)
            _run(model, tracer, example_inputs, dict(example_kwargs or {}))
            found = _constants_kept(model, tracer, kept)
            keeping |= tracer.writers() | {module for module, _ in found}
        if calls == 1 or not (found or tracer.has_grown()):
            break
        computed_once = [op for _, ops in found for op in ops]
    return tracer.program(computed_once)


def _constants_kept(
    model: nn.Module, tracer: _Tracer, before: Mapping[tuple[int, str, Any], torch.Tensor]
) -> list[tuple[int, list[Op]]]:
    """The ``id`` of each module that keeps a constant now, unlike before, and the calls that have computed it."""
    value_of = functools.partial(tracer.value_of, name="", kind=ValueKind.OTHER)
    new = [(place[0], tensor) for place, tensor in kept_tensors(model).items() if tensor is not before.get(place)]
    known = [*map(value_of, before.values())]
    found = [(module, calls_of_constant(value_of(tensor), known)) for module, tensor in new]
    return [(module, ops) for module, ops in found if ops]


def _run(model: nn.Module, tracer: _Tracer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Call a model once, traced."""
    with evaluated(model):
        undo = tracer.install()
        try:
            with torch.compiler.set_stance("force_eager"), tracer.mode:  # compiled parts run as they were written
                model(*args, **kwargs)
            tracer.note_assigned()
        except Exception as error:
            where = tracer.failed_in
            raise TraceError(
                f"The model raised {type(error).__name__} in its forward (module {where or '<root>'!r}) while it was "
                f"traced with the example inputs: {error}. Check that model(*example_inputs) runs in eval mode."
                f"{inputs_by_name(model, args)}"
            ) from error
        finally:
            for restore in undo:
                restore()


class _Frame:
    """One running module call."""

    __slots__ = ("call", "counts", "path", "recording")

    def __init__(self, path: str, recording: bool) -> None:
        self.path = path
        self.recording = recording
        self.counts: dict[str, int] = {}
        self.call = ModuleCall(path)


class _Tracer:
    """Records ops and values while the model runs."""

    def __init__(self, model: nn.Module, on_op: Callable[[Op], None] | None, every_call: bool) -> None:
        self.model = model
        self.on_op = on_op
        self.every_call = every_call
        self.states = collect_states(model)
        self.by_tensor: dict[int, StateTensor] = {id(state.tensor): state for state in self.states.values()}
        self.paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
        self.ops: list[Op] = []
        self.calls: dict[str, ModuleCall] = {}
        self.frames: list[_Frame] = []
        self.visited: set[str] = set()
        self.values: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], Value]] = {}
        self.state_values: dict[int, Value] = {}
        self.enclosed: list[tuple[str, Op]] = []
        self.assigned: dict[str, Value] = {}
        self.failed_in: str | None = None
        self.mode = _RecordingMode(self)
        self.handed_out = HandedOut(lambda: self.frames[-1].path if self.frames else None)
        # What lies in the memory of each parameter, which so is given to nothing else.
        self.content = {
            name: (parameter, parameter.detach())
            for name, parameter in model.named_parameters()
            if not nn.parameter.is_lazy(parameter)
        }

    def has_grown(self) -> bool:
        """Whether the model has registered modules, parameters or buffers since the tracer was made."""
        return self.paths.keys() != {id(module) for module in self.model.modules()} or self.states.keys() != (
            collect_states(self.model).keys()
        )

    def writers(self) -> set[int]:
        """The ``id`` of each module in whose forward a parameter was written to."""
        parameters = {name for state in self.states.values() if state.is_parameter for name in state.names}
        paths = {path for op in self.ops if not parameters.isdisjoint(op.overwrites) for path in op.module_stack}
        return {module for module, path in self.paths.items() if path in paths}

    def install(self) -> list[Callable[[], None]]:
        modules = [m for m in self.model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        undo = [wrap_forward(_TraceScope(module, self)) for module in modules]
        return undo + [back for module in modules for back in self.handed_out.watch(module, self.paths[id(module)])]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Frame:
        path = self.paths[id(module)]
        self.handed_out.note_call(module)
        first = path not in self.visited
        frame = _Frame(path, (first or self.every_call) and not _in_transform())
        self.visited.add(path)
        if path in self.calls:
            self.calls[path].times += 1
        if first:
            if self.frames and self.frames[-1].recording:
                self.frames[-1].call.children.append(path)
            self.calls[path] = frame.call
        if self._shows(frame):
            kind = ValueKind.INPUT if not self.frames else ValueKind.OTHER
            for name, leaf in _flat_arguments(module, args, kwargs):
                frame.call.input_names.append(name)
                frame.call.inputs.append(self.value_of(leaf, name, kind))
        self.frames.append(frame)
        return frame

    def leave(self, frame: _Frame, output: Any) -> None:
        if not self._shows(frame):
            return
        if self.calls[frame.path] is not frame.call:
            self.calls[frame.path].repeats.append(frame.call)
        for index, leaf in enumerate(tree_leaves(output)):
            frame.call.outputs.append(self.value_of(leaf, f"{frame.path or 'model'}_out_{index}", ValueKind.OTHER))

    def _shows(self, frame: _Frame) -> bool:
        """Whether what crosses a module's boundary is recorded; inside ``torch.vmap`` it has no numbers to look at."""
        recording = frame.recording or (bool(self.frames) and self.frames[-1].recording)
        return recording and not _in_transform()

    def record(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Any,
        base: str,
        written_in: tuple[str, int] | None,
    ) -> Any:
        """Run ``func``, called ``base``; ``inputs`` are the values looked up before the call (it may work in place).

        The output of a function that returns nothing, such as ``x[0] = y``, is what it wrote to.
        """
        frame = self.frames[-1]
        number = frame.counts.get(base, 0)
        frame.counts[base] = number + 1
        result = func(*args, **kwargs)
        call = f"{base}_{number}" if number else base
        stack = tuple(f.path for f in self.frames)
        op = Op(f"{frame.path}.{call}" if frame.path else call, base, func, stack, call, written_in=written_in)
        for index, name, item, value in inputs:
            argument = Argument(op, index, name, value, item)
            op.arguments.append(argument)
            value.uses.append(argument)
            if value.state is not None:
                value.state.uses.append(argument)
        op.literals = _literals(func, args, kwargs)
        op.overwrites = self._overwritten(base, args, kwargs)
        written = result is None and args and isinstance(args[0], torch.Tensor) and id(args[0]) not in self.by_tensor
        for index, leaf in enumerate(tree_leaves(args[0] if written else result)):
            if isinstance(leaf, torch.Tensor):
                value = self._new_value(leaf, op.name, ValueKind.INTERMEDIATE)
                value.producer, value.output_index = op, index
                op.outputs.append(value)
        self.ops.append(op)
        frame.call.ops.append(op)
        if self.on_op is not None:
            self.on_op(op)
        return result

    def _overwritten(self, base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the model's parameters and buffers that lie in the memory that a call has written to."""
        targets = [kwargs.get("out")]
        if is_in_place(base):
            targets += args[:1] or [kwargs.get("input"), kwargs.get("tensor")]  # the latter in torch.nn.init
        written = {memory for leaf in tree_leaves(targets) if (memory := memory_of(leaf)) is not None}
        if not written:
            return ()
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return tuple(n for n, tensor in tensors.items() if memory_of(tensor) in written and not self._is_made_now(n))

    def _is_made_now(self, name: str) -> bool:
        """Whether a tensor belongs to a lazy module, which makes its tensors in its first call and then is another."""
        owner, _, _ = name.rpartition(".")
        return isinstance(self.model.get_submodule(owner), LazyModuleMixin)

    def lookup(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        names = argument_names(func)
        found: list[Any] = []
        entries = [(i, names[i] if i < len(names) else str(i), a) for i, a in enumerate(args)]
        entries += [(names.index(k) if k in names else len(args) + n, k, v) for n, (k, v) in enumerate(kwargs.items())]
        for index, name, entry in entries:
            if isinstance(entry, torch.Tensor):
                found.append((index, name, None, self.value_of(entry, name, ValueKind.OTHER)))
            elif isinstance(entry, (list, tuple)):
                for item, leaf in enumerate(entry):
                    if isinstance(leaf, torch.Tensor):
                        found.append((index, name, item, self.value_of(leaf, name, ValueKind.OTHER)))
        return found

    def note_enclosed(
        self, place: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], base: str
    ) -> None:
        """Note the states that a call inside ``torch.vmap``, another transform, or ``torch.cond`` reads as they are."""
        path, names = self.frames[-1].path, argument_names(func)
        name = f"{path}.{base}" if path else base
        op = Op(name, base, func, tuple(frame.path for frame in self.frames), base)
        given = [(names[i] if i < len(names) else str(i), entry) for i, entry in enumerate(args)]
        for index, (role, entry) in enumerate([*given, *kwargs.items()]):
            state = self.by_tensor.get(id(entry))
            if state is not None:
                op.arguments.append(Argument(op, index, role, self._state_value(state)))
        if op.arguments:
            self.enclosed.append((place, op))

    def note_assigned(self) -> None:
        """Note what the forward has put in the places of buffers."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for state in self.states.values():
            for path, attribute in () if state.is_parameter else state.owners:
                now = modules[path]._buffers.get(attribute) if path in modules else None
                if now is not None and now is not state.tensor:
                    self.assigned[state.name] = self.value_of(now, state.name, ValueKind.OTHER)

    def value_of(self, leaf: Any, name: str, kind: ValueKind) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        leaf = self.handed_out.origin(leaf)
        state = self.by_tensor.get(id(leaf))
        if state is not None:
            return self._state_value(state)
        known = self.values.get((id(leaf), _version(leaf)))
        if known is not None and known[0]() is leaf:
            return known[1]
        return self._new_value(leaf, name, kind)

    def _state_value(self, state: StateTensor) -> Value:
        value = self.state_values.get(id(state))
        if value is None:
            value = Value(state.name, ValueKind.STATE, tuple(state.tensor.shape), state.tensor.dtype, state=state)
            self.state_values[id(state)] = value
        return value

    def _new_value(self, tensor: torch.Tensor, name: str, kind: ValueKind) -> Value:
        value = Value(name, kind, tuple(tensor.shape), tensor.dtype, is_masked=holds_mask(tensor))
        self.values[(id(tensor), _version(tensor))] = (weakref.ref(tensor), value)
        return value

    def program(self, computed_once: Sequence[Op]) -> Program:
        root = self.calls.get("", ModuleCall(""))
        again = set(map(_place, self.ops))
        return Program(
            mode="eager",
            ops=self.ops,
            states=self.states,
            calls=self.calls,
            inputs=[value for value in root.inputs if value is not None],
            outputs=[value for value in root.outputs if value is not None],
            modules={path: type(module) for path, module in self.model.named_modules()},
            replaced=tuple(name for name, (now, old) in self.content.items() if memory_of(now) != memory_of(old)),
            assigned=self.assigned,
            readers=self.handed_out.readers,
            listed=self.handed_out.listed,
            by_key=tuple(self.handed_out.by_key),
            computed_once=tuple(op for op in computed_once if _place(op) not in again),
            enclosed=tuple(self.enclosed),
        )


class _TraceScope(ForwardScope):
    """Tells the tracer when a module's forward begins and ends."""

    def __init__(self, module: nn.Module, tracer: _Tracer) -> None:
        super().__init__(module)
        self.tracer = tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = self.tracer
        frame = tracer.enter(self.module, args, kwargs)
        try:
            output = self.run(*args, **kwargs)
        except Exception:
            tracer.failed_in = tracer.failed_in if tracer.failed_in is not None else frame.path
            raise
        finally:
            tracer.frames.pop()
        tracer.leave(frame, output)
        return output


class _RecordingMode(TorchFunctionMode):
    """Sends every call on tensors that runs inside a module to the tracer."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.inside: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frames = self.tracer.frames
        self.tracer.handed_out.note(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _TRANSPOSES:
            name = func.__self__.__name__  # type: ignore[attr-defined]
        place = "a transform such as torch.vmap" if _in_transform() else self.inside
        if frames and place and name not in _NOT_OPS:
            self.tracer.note_enclosed(place, func, args, kwargs, name)
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator) and name in _BRANCHING:
            args = [self._watched(name, entry) if callable(entry) else entry for entry in args]
        if not frames or not frames[-1].recording or name in _NOT_OPS:
            return func(*args, **kwargs)
        written_in = calling_code()
        return self.tracer.record(func, args, kwargs, self.tracer.lookup(func, args, kwargs), name, written_in)

    def _watched(self, place: str, branch: Callable[..., Any]) -> Callable[..., Any]:
        """A branch of ``torch.cond``, say, whose reads of states are noted."""

        def run(*operands: Any) -> Any:
            self.inside = place
            try:
                with self:
                    return branch(*operands)
            finally:
                self.inside = None

        return run


_BRANCHING = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan"})

# Attributes of a tensor that are ops.
_TRANSPOSES = frozenset({"T", "mT", "H", "mH"})

_NOT_OPS = frozenset(
    {"__get__", "__set__", "__delete__", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"}
    | {
        "is_complex",
        "_set_grad_enabled",
        "__len__",
        "__repr__",
        "__format__",
        "storage_offset",
        "data_ptr",
        "ndimension",
    }
    | {"get_device", "element_size", "is_same_size", "is_nonzero", "has_names", "_is_view", "untyped_storage"}
)


def _place(op: Op) -> tuple[Any, ...]:
    """Where a call was made: in which module, and where in its code."""
    return op.module_path, op.type, op.written_in


def _version(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def _literals(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = argument_names(func)
    plain = (bool, int, float, str)
    if getattr(func, "__name__", "") == "permute":
        given = args[1:] or (kwargs.get("dims", ()),)
        return {"dims": tuple(given[0]) if isinstance(given[0], (tuple, list)) else tuple(given)}
    if getattr(func, "__name__", "") == "__getitem__":
        return {"index": args[1]} if _is_basic_index(args[1]) else {}

    def is_plain(entry: Any) -> bool:
        return isinstance(entry, plain) or (
            isinstance(entry, (tuple, list)) and all(type(number) is int for number in entry)
        )

    kept = {names[i] if i < len(names) else str(i): a for i, a in enumerate(args) if is_plain(a)}
    return {**kept, **{key: entry for key, entry in kwargs.items() if is_plain(entry)}}


def _is_basic_index(index: Any) -> bool:
    """Whether an index returns a view: no lists, tensors or truth values in it."""
    kinds = (int, slice, EllipsisType, NoneType)
    entries = index if isinstance(index, tuple) else (index,)
    return all(isinstance(entry, kinds) and not isinstance(entry, bool) for entry in entries)


def _flat_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return ``(parameter name, leaf)`` for the flattened arguments in the order of forward's signature."""
    cls: Any = type(module)
    names = _forward_parameters(cls)
    named = [(names[i] if i < len(names) else f"arg_{i}", entry) for i, entry in enumerate(args)]
    order = {name: i for i, name in enumerate(names)}
    named += sorted(kwargs.items(), key=lambda entry: order.get(entry[0], len(order)))
    flat: list[tuple[str, Any]] = []
    for name, entry in named:
        leaves = tree_leaves(entry)
        flat += [(name if len(leaves) == 1 else f"{name}_{i}", leaf) for i, leaf in enumerate(leaves)]
    return flat


@functools.lru_cache(maxsize=1024)
def _forward_parameters(cls: type[nn.Module]) -> list[str]:
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
