"""States that a traced forward asks its modules for, by ``parameters()`` and the like, and which of them it reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitwright._utils.own_states import LISTINGS, is_listed_by_torch

__all__ = ["HandedOut"]

# What has nothing to do with numbers: ``next(self.parameters()).dtype`` is asked for often.
_ATTRIBUTES = frozenset(
    {"device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse"}
    | {"layout", "names", "requires_grad"}
)
_QUESTIONS = frozenset(
    {"get_device", "is_complex", "is_floating_point", "is_inference"}
    | {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
)
_LIKE_ANOTHER = frozenset({"to", "type_as"})


class HandedOut:
    """Hands out an alias of each state, so that what is done with it differs from what layers do with their own.

    Args:
        running: returns the path of the module whose forward is running, None outside the model.

    Attributes:
        by_key: names of parameters that a forward has looked up in ``_parameters``.
    """

    def __init__(self, running: Callable[[], str | None]) -> None:
        self._running = running
        self._own: set[int] = set()
        self._swapped = False
        self.by_key: dict[str, None] = {}
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor, str, str]] = {}
        self._readers: dict[str, None] = {}
        self._listed: dict[str, None] = {}

    @property
    def readers(self) -> tuple[str, ...]:
        """Paths of modules whose forwards read what they asked for; none if they give it back by name."""
        return () if self._swapped else tuple(self._readers)

    @property
    def listed(self) -> tuple[str, ...]:
        """Paths of modules that they asked."""
        return () if self._swapped else tuple(self._listed)

    def note_call(self, module: nn.Module) -> None:
        """Take note of a call of a module, which may be one of ``torch.func.functional_call``.

        That puts tensors in the places of states, by the names that the model has them under while it is prepared.
        """
        self._swapped |= any(tensor is not None and id(tensor) not in self._own for tensor in _slots(module))

    def watch(self, module: nn.Module, path: str) -> list[Callable[[], Any]]:
        """Have a module's methods hand out aliases; return the functions that undo it."""
        self._own |= set(map(id, _slots(module)))
        ways: dict[str, Callable[..., Any]] = {
            "state_dict": self._state_dict, "get_parameter": self._one, "get_buffer": self._one,
        }  # fmt: skip
        undo: list[Callable[[], Any]] = [_Parameters(self, module, path).put_in_place()]
        for method in LISTINGS:
            if is_listed_by_torch(module, method):
                listing = ways.get(method, self._named)
                module.__dict__[method] = partial(listing, getattr(module, method), path)
                undo.append(partial(module.__dict__.pop, method, None))
        return undo

    def origin(self, leaf: Any) -> Any:
        """Return the state that ``leaf`` is an alias of, else itself."""
        known = self._aliases.get(id(leaf))
        return leaf if known is None else known[1]

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take note of what a call, of whatever function of torch, reads."""
        if not self._aliases or _is_question(func):
            return
        passed = args[1:] if getattr(func, "__name__", "") in _LIKE_ANOTHER else ()
        harmless = {id(leaf) for leaf in tree_leaves((passed, dict(kwargs) if passed else {}))}
        for leaf in tree_leaves((args, dict(kwargs))):
            if id(leaf) in self._aliases and id(leaf) not in harmless:
                _, _, reader, path = self._aliases[id(leaf)]
                self._readers[reader] = self._listed[path] = None

    def _named(
        self, listing: Callable[..., Iterator[tuple[str, torch.Tensor]]], path: str, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in listing(*args, **kwargs):
            yield name, self._alias(tensor, tensor, path)

    def _state_dict(self, listing: Callable[..., dict[str, Any]], path: str, *args: Any, **kwargs: Any) -> Any:
        states = listing(*args, **{**kwargs, "keep_vars": True})
        keep = kwargs.get("keep_vars", False)
        for name, tensor in list(states.items()):
            if isinstance(tensor, torch.Tensor):
                states[name] = self._alias(tensor, tensor if keep else tensor.detach(), path)
        return states

    def _one(self, getter: Callable[[str], torch.Tensor], path: str, target: str) -> torch.Tensor:
        tensor = getter(target)
        reader = self._running()
        if reader is not None:  # what is no parameter any more is refused, whether its numbers are read or not
            self._readers[reader] = self._listed[path] = None
        return self._alias(tensor, tensor, path)

    def _alias(self, tensor: torch.Tensor, like: torch.Tensor, path: str) -> torch.Tensor:
        reader = self._running()
        if reader is None or type(like) not in (torch.Tensor, nn.Parameter):
            return like
        with torch._C.DisableTorchFunction():
            alias = like.detach()
            if isinstance(like, nn.Parameter):
                alias = nn.Parameter(alias, requires_grad=like.requires_grad)
        self._aliases[id(alias)] = (alias, tensor, reader, path)
        return alias


class _Parameters(dict[str, Any]):
    """A module's own parameters, which notes the keys that the model's code looks up."""

    def __init__(self, handed_out: HandedOut, module: nn.Module, path: str) -> None:
        super().__init__(module._parameters)
        self._handed_out = handed_out
        self._module = module
        self._path = path

    def put_in_place(self) -> Callable[[], Any]:
        """Stand in for the module's dictionary; return the function that puts that back, as the forward left it."""
        slots = self._module._parameters
        self._module.__dict__["_parameters"] = self

        def undo() -> None:
            slots.clear()
            slots.update(self)
            self._module.__dict__["_parameters"] = slots

        return undo

    def __getitem__(self, key: str) -> Any:
        self._note(key, sys._getframe(1))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, sys._getframe(1))
        return super().get(key, default)

    def _note(self, key: str, caller: FrameType) -> None:
        own = str(caller.f_globals.get("__name__", "")).startswith(("torch.", "bitwright."))
        if not own and self._handed_out._running() is not None:
            self._handed_out.by_key[f"{self._path}.{key}" if self._path else key] = None


def _slots(module: nn.Module) -> list[torch.Tensor | None]:
    return list(module._parameters.values())


def _is_question(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _ATTRIBUTES
    return name in _QUESTIONS
