"""What a training forward computes apart from its result: running statistics, codebooks, counters.

Models keep them under ``torch.no_grad``, in training only, so that planning has not seen these calls. As long as their
results end in parameters and buffers, nobody need know of them. Where one reaches a call of the module itself, another
module or the module's result, it belongs to what the module computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from bitwright._utils.tensor_memory import memory_of

__all__ = ["QUESTIONS", "Bookkeeping"]

#: Functions that answer with numbers, or that change no result.
QUESTIONS = frozenset(
    {"__bool__", "__float__", "__format__", "__get__", "__int__", "__len__", "__repr__", "__set__", "dim", "item"}
    | {"numel", "size", "tolist"}
)


class Bookkeeping:
    """Results of calls that stand apart in one forward of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._states = self._memories_of_states()
        # The weak reference keeps the number of a memory that is gone from being given to another one.
        self._made_by: dict[int, tuple[Any, frozenset[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._made_by)

    def note(self, call: str | None, arguments: Any, result: Any) -> None:
        """Note what a call has made.

        Args:
            call: its name, if it is to be told where its result is used; None for others, which hand on what they read.
            arguments: what it read.
            result: what it returned, or wrote to.
        """
        calls = self._calls_behind(arguments) | ({call} if call is not None else set())
        if not calls:
            return
        for leaf in tree_leaves(result):
            memory = memory_of(leaf)
            if memory is not None and memory not in self._states:
                known = self._made_by[memory][1] if memory in self._made_by else frozenset()
                weak: Any = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
                self._made_by[memory] = weak, known | calls

    def used_by(self, arguments: Any) -> Iterable[str]:
        """Return the calls whose results are among ``arguments``, in order; not those that lie in a state by now."""
        calls = self._calls_behind(arguments)
        if calls:
            self._states = self._memories_of_states()
            for memory in self._states & self._made_by.keys():
                del self._made_by[memory]
            calls = self._calls_behind(arguments)
        return sorted(calls)

    def _calls_behind(self, arguments: Any) -> set[str]:
        memories = (memory_of(leaf) for leaf in tree_leaves(arguments)) if self._made_by else ()
        return {call for memory in memories if memory in self._made_by for call in self._made_by[memory][1]}

    def _memories_of_states(self) -> set[int]:
        states = [*self._module.parameters(), *self._module.buffers()]
        return {memory for state in states if (memory := memory_of(state)) is not None}
