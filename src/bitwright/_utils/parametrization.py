"""Simulators on weights: torch's parametrization, made picklable and reversible, and usable by RNNs.

torch gives each parametrized module a class of its own, which pickle cannot find. The class gets a ``__reduce_ex__``
that stores the base class and rebuilds the parametrized one on loading. It also has the base class's name.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize

from bitwright.config.spec import CompressionSimulatorBase

from .adapter_merging import is_merging, is_unloading, peft_is_in_use
from .call_frames import shielded, thread_frames
from .packed_weights import is_packed, refuse_merge, refuse_write
from .weight_writes import notice_read, places_seen

__all__ = ["clear_parametrization", "order_before", "original_tensor", "own_parametrizations", "parametrize_tensor"]

_ORDER = "_bitwright_order"


def own_parametrizations(module: nn.Module) -> Mapping[str, Any]:
    """Return the ``ParametrizationList`` of each parametrized tensor of a module, by the tensor's name.

    ``parametrize.is_parametrized`` asks for an attribute, which a wrapper may answer with that of the layer inside it.
    """
    if "parametrizations" not in module._modules:  # a scripted module's dictionary has no get()
        return {}
    own = module._modules["parametrizations"]
    return own._modules if isinstance(own, nn.ModuleDict) else {}


def parametrize_tensor(module: nn.Module, name: str, simulator: nn.Module) -> Callable[[], None]:
    """Make ``module.<name>`` read as ``simulator(tensor)``; the tensor goes to ``parametrizations.<name>.original``.

    Returns:
        The function that undoes it: the tensor stands in its old place again, in the old order.
    """
    own = own_parametrizations(module)
    stacked = name in own
    order = [*module._parameters, *module._buffers]
    first = _ORDER not in module.__dict__
    if name in order:
        module.__dict__.setdefault(_ORDER, tuple(order))
    if not own:  # until torch puts a ModuleDict there: a wrapper answers with that of the layer inside it
        module.__dict__["parametrizations"] = None
    parametrize.register_parametrization(module, name, simulator, unsafe=True)
    _keep_with_tensor(simulator, own_parametrizations(module)[name])
    _disguise(module)
    if not stacked:
        _quicken(module, name)
    if isinstance(module, nn.RNNBase):
        _restore_rnn(module)

    def undo() -> None:
        chain: Any = own_parametrizations(module)[name]
        if len(chain) > 1:
            del chain._modules[str(len(chain) - 1)]
            return
        clear_parametrization(module, name)
        if first:
            module.__dict__.pop(_ORDER, None)

    return undo


def order_before(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's parameters and buffers before the first simulator came; empty if none has."""
    names: tuple[str, ...] = module.__dict__.get(_ORDER, ())
    return names


def clear_parametrization(module: nn.Module, name: str) -> None:
    """Take all simulators off ``module.<name>``; the original tensor stands in its place again, in the old order."""
    original = original_tensor(module, name)
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    slots: Any = module._parameters if isinstance(original, nn.Parameter) else module._buffers
    slots[name] = original
    for own in (module._parameters, module._buffers):
        _reorder(own, order_before(module))
    if not own_parametrizations(module):
        module.__dict__.pop(_ORDER, None)
    if isinstance(module, nn.RNNBase) and not own_parametrizations(module):
        _restore_rnn(module)


def _reorder(slots: dict[str, Any], order: Sequence[str]) -> None:
    rank = {name: position for position, name in enumerate(order)}
    entries = sorted(slots.items(), key=lambda entry: rank.get(entry[0], len(rank)))
    slots.clear()
    slots.update(entries)


def _keep_with_tensor(simulator: nn.Module, chain: nn.Module) -> None:
    """Move a simulator to the device of its tensor, so that all buffers of a model on a GPU are there."""
    for tensor in (*chain._parameters.values(), *chain._buffers.values()):
        if tensor is not None and not tensor.is_meta:
            simulator.to(tensor.device)
            return


def original_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """Return the tensor behind ``module.<name>``, whether it is parametrized or not."""
    chain = own_parametrizations(module).get(name)
    tensor: torch.Tensor = getattr(module, name) if chain is None else chain.original
    return tensor


def _quicken(module: nn.Module, name: str) -> None:
    """Let the usual case, one simulator and no hooks, skip the generic machinery on each read of the weight."""
    cls: Any = type(module)
    generic: property = cls.__dict__[name]
    generic_read: Any = generic.fget
    generic_write: Any = generic.fset
    own_forward = _forward_of_torch(_plain_class(module))

    def read(self: nn.Module) -> torch.Tensor:
        parametrizations = self._modules.get("parametrizations")
        if parametrizations is None:  # another instance of this class, as adapters make them of the layer they wrap
            own = nn.Module.__getattr__(self, name)
            assert isinstance(own, torch.Tensor)
            return own
        chain: Any = parametrizations._modules[name]
        simulators, original = chain._modules, chain._parameters.get("original")
        if peft_is_in_use() and original is not None and is_merging(sys._getframe(1)):
            if is_packed(simulators.values()):
                refuse_merge(_in_words(self, name))
            return _handed_out(original, simulators.values())
        is_taken = False
        if not is_dynamo_compiling():
            caller = sys._getframe(1)
            code = caller.f_code
            if code is not own_forward:
                seen = places_seen.get((id(code), caller.f_lasti))
                if seen is None or (seen[1] and is_packed(simulators.values())):
                    notice_read(caller, self, name)
                    seen = places_seen.get((id(code), caller.f_lasti))
                is_taken = seen is not None and seen[2] and not is_packed(simulators.values())
        plain = original is not None and len(simulators) == 1 and not parametrize._cache_enabled
        if not plain or chain._forward_hooks or chain._forward_pre_hooks:
            run, arguments = generic_read, (self,)
        else:
            run, arguments = simulators["0"], (original,)
        # What a simulator calls is no call of the module that reads its weight.
        tensor: torch.Tensor = shielded(run, *arguments) if thread_frames.stack else run(*arguments)
        return tensor.clone() if is_taken else tensor  # the simulator may have kept it

    def write(self: nn.Module, value: Any) -> None:
        if peft_is_in_use() and is_unloading(sys._getframe(2)):  # behind nn.Module.__setattr__
            return
        if is_packed(own_parametrizations(self).get(name)):
            refuse_write(_in_words(self, name))
        generic_write(self, value)

    setattr(cls, name, property(read, write, generic.fdel))


def _in_words(module: nn.Module, name: str) -> str:
    return f"{name!r} of the {_plain_class(module).__name__}"


def _plain_class(module: nn.Module) -> Any:
    """Return the class that a parametrized module had before."""
    return type(module).__bases__[0]


def _forward_of_torch(cls: type[nn.Module]) -> CodeType | None:
    """Return the code of a layer's forward if it is torch's, which writes to no weight."""
    forward: Any = cls.forward
    own = str(getattr(forward, "__module__", "")).startswith("torch.nn.modules.")
    return getattr(forward, "__code__", None) if own else None


def _handed_out(original: torch.Tensor, simulators: Iterable[Any]) -> torch.Tensor:
    """Return a tensor to be written to, and tell its simulators."""
    for simulator in simulators:
        if isinstance(simulator, CompressionSimulatorBase):
            simulator.expect_new_weight()
    return original


def _register_parameter(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Take ``layer.weight = nn.Parameter(...)`` of a simulated weight for the dense one; a packed one has none."""
    parametrizations = self._modules.get("parametrizations")
    if is_packed(own_parametrizations(self).get(name.removesuffix("_orig"))):  # whither torch.nn.utils.prune moves it
        refuse_write(_in_words(self, name.removesuffix("_orig")))
    if parametrizations is None or parameter is None or name not in parametrizations._modules:
        _plain_class(self).register_parameter(self, name, parameter)
        return
    chain: Any = parametrizations._modules[name]
    chain.original = _handed_out(parameter, chain)


def _disguise(module: nn.Module) -> None:
    cls: Any = type(module)
    base = _plain_class(module)
    cls.__name__, cls.__qualname__ = base.__name__, base.__qualname__  # some forwards ask for it
    cls.register_parameter = _register_parameter
    cls.__reduce_ex__ = _reduce_parametrized
    cls.__setstate__ = _restore_parametrized
    if "__deepcopy__" in vars(cls):  # torch's own; copy would find it on a wrapper too that hands attributes on
        del cls.__deepcopy__
    if isinstance(module, nn.RNNBase) and "_flat_weights" not in vars(cls):
        cls._flat_weights = property(_read_flat_weights, _write_flat_weights)
        cls.forward = _with_live_weights(base.forward)


def _reduce_parametrized(self: nn.Module, protocol: Any) -> Any:
    base = _plain_class(self)
    # torch's parametrized class forbids pickling; its base may have a form of its own
    state = _state_of_rnn(self, base) if isinstance(self, nn.RNNBase) else base.__getstate__(self)
    return _new_instance, (base,), state


def _new_instance(base: type[nn.Module]) -> nn.Module:
    """Return an empty module in a parametrized class of its own: finalizing a copy deletes attributes of its class."""
    module = base.__new__(base)
    parametrize._inject_new_class(module)
    _disguise(module)
    return module


def _restore_parametrized(self: nn.Module, state: dict[str, Any]) -> None:
    base = _plain_class(self)
    base.__setstate__(self, state)
    own = own_parametrizations(self)
    if not own:
        self.__class__ = base
        return
    for name in own:
        parametrize._inject_property(self, name)
        _quicken(self, name)
    if isinstance(self, nn.RNNBase):
        _restore_rnn(self)


def _state_of_rnn(module: nn.RNNBase, base: Any) -> dict[str, Any]:
    """Return an RNN's state with its dense weights; RNNBase would first read them through their simulators."""
    unnamed = base.__new__(type(module))  # the module itself may be running in another thread
    unnamed.__dict__.update(module.__dict__, _flat_weights_names=[], _flat_weight_refs=[])
    state: dict[str, Any] = base.__getstate__(unnamed)
    return {**state, "_flat_weights_names": module._flat_weights_names, "_flat_weights": _dense_weights(module)}


class _LiveWeights(threading.local):
    """Weights of the RNNs that are being called in this thread.

    Attributes:
        lists: what each module's call reads as ``_flat_weights``, by the module's ``id``.
    """

    def __init__(self) -> None:
        self.lists: dict[int, list[Any]] = {}


_live = _LiveWeights()


def _with_live_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an RNN that uses its weights as its simulators return them.

    RNN modules keep their weights in a list besides. Other threads may call the module at the same time, so that the
    list that is made for a call is the thread's, and the module keeps that of its dense weights.
    """

    @functools.wraps(forward)
    def simulated(self: Any, *args: Any, **kwargs: Any) -> Any:
        key, lists = id(self), _live.lists
        outer = lists.get(key)
        lists[key] = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return forward(self, *args, **kwargs)
        finally:
            if outer is None:
                del lists[key]
            else:
                lists[key] = outer
            _restore_rnn(self)

    return simulated


def _read_flat_weights(self: nn.RNNBase) -> Any:
    live = _live.lists.get(id(self))
    if live is not None:
        return live
    try:
        return self.__dict__["_flat_weights"]
    except KeyError:
        raise AttributeError("_flat_weights") from None


def _write_flat_weights(self: nn.RNNBase, value: list[Any]) -> None:
    if id(self) in _live.lists:
        _live.lists[id(self)] = value
    else:
        self.__dict__["_flat_weights"] = value


def _dense_weights(module: Any) -> list[Any]:
    """Return the tensors behind an RNN's weights; None where torch's parametrization made several of one."""
    own = own_parametrizations(module)
    names = module._flat_weights_names
    return [getattr(own[name], "original", None) if name in own else getattr(module, name, None) for name in names]


def _restore_rnn(module: Any) -> None:
    module.__dict__["_flat_weights"] = _dense_weights(module)
