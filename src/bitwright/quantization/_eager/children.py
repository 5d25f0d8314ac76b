"""Children that a module's own forward does not meet.

Simulators on the calls of a module are among its children, under the names that checkpoints have them by. A forward
that goes over its children, as that of ``nn.Sequential`` does, would call them as if they were layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitwright._utils.call_frames import thread_frames

__all__ = ["Children"]


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
