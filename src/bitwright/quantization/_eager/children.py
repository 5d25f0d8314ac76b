"""Children that a module's own forward does not meet.

Simulators on the calls of a module are among its children, under the names that checkpoints have them by. A forward
that goes over its children, as that of ``nn.Sequential`` does, would call them as if they were layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from bitwright._utils.call_frames import thread_frames

__all__ = ["Children", "goes_over_children"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WAYS = frozenset({"children", "named_children", "modules", "named_modules", "_modules"})


class Children(dict[str, Any]):
    """The children of a module, without the simulators while its own forward looks at them.

    Attributes:
        hidden: names of the simulators.
    """

    def __init__(self, children: Mapping[str, Any]) -> None:
        super().__init__(children)
        self.hidden: set[str] = set()

    def _shown(self) -> dict[str, Any]:
        frames = thread_frames.stack
        everything = {name: self[name] for name in super().__iter__()}
        if not frames or frames[-1] is None or frames[-1].module._modules is not self:
            return everything
        return {name: child for name, child in everything.items() if name not in self.hidden}

    def copy(self) -> Children:
        twin = Children(self)
        twin.hidden |= self.hidden
        return twin

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def keys(self) -> Any:
        return self._shown().keys()

    def values(self) -> Any:
        return self._shown().values()

    def items(self) -> Any:
        return self._shown().items()


def goes_over_children(module: nn.Module) -> bool:
    """Whether a module may go over its children in its forward: as a container, or by a method that asks for them."""
    own = (member for cls in type(module).__mro__ if cls is not nn.Module for member in vars(cls).values())
    codes = (member.__code__ for member in own if isinstance(member, FunctionType))
    return isinstance(module, _CONTAINERS) or any(not _WAYS.isdisjoint(code.co_names) for code in codes)
