"""Code that writes to a weight which a simulator stands on, and so would change a copy that is gone at once.

Such code asks the layer for its weight and does one more thing with it: ``layer.weight.data = x``,
``layer.weight.data.clamp_(-1, 1)``, ``layer.weight[0] = 0``. What it does next stands in the code behind the read, so
that one look at each place is enough.
"""

from __future__ import annotations

import dis
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from torch import nn

from bitwright.errors import BitwrightWarning

from .packed_weights import is_packed, refuse_write

__all__ = ["NO_WRITES", "next_write", "notice_read", "places_seen", "takes_memory"]

#: Places that were looked at, with their code, which so keeps its ``id``, whether they write, and whether they may
#: write where no version counter tells of it.
places_seen: dict[tuple[int, int], tuple[CodeType, bool, bool]] = {}
_MOST_PLACES = 1 << 16
#: Methods of a tensor whose names end with "_" though they leave its numbers alone.
NO_WRITES = frozenset({"requires_grad_", "share_memory_", "rename_"})
_SHARING = ("data", "detach", "numpy", "__array__")
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"})
_METHODS = ("LOAD_ATTR", "LOAD_METHOD")
_KEY_PARTS = ("LOAD_", "BUILD_", "UNARY_", "BINARY_")
_STORES = {"STORE_SUBSCR": 1, "STORE_SLICE": 2}


def notice_read(caller: FrameType, module: nn.Module, name: str) -> None:
    """Warn if the code that reads ``module.<name>`` writes to what it gets.

    To be called once for each place; for packed weights wherever ``places_seen`` says that the code writes.

    Raises:
        PackedWeightError: the code writes to a weight that is packed.
    """
    code, offset = caller.f_code, caller.f_lasti
    write = next_write(code, offset)
    layer = f"the {type(module).__bases__[0].__name__}"
    chains: Any = module._modules["parametrizations"]
    if write is not None and is_packed(chains._modules[name]):
        refuse_write(f"{name!r} of {layer}")
    if len(places_seen) >= _MOST_PLACES:
        places_seen.clear()
    places_seen[id(code), offset] = code, write is not None, write is not None or takes_memory(code, offset)
    if write is None:
        return
    depth = 1
    while sys._getframe(depth) is not caller:
        depth += 1
    warnings.warn(
        f"{code.co_qualname} writes to {name!r} of {layer} by '.{name}{write}', which is lost: a simulator stands on "
        "that weight, and its attribute is a copy that is computed anew each time. Write to "
        f"layer.parametrizations.{name}.original, or to what model.parameters() yields.",
        BitwrightWarning,
        stacklevel=depth + 1,
    )


def takes_memory(code: CodeType, offset: int) -> bool:
    """Tell whether the code behind an instruction asks the tensor on the stack for one that shares its memory."""
    steps = (step for step in dis.get_instructions(code) if step.offset > offset and step.opname not in _SKIPPED)
    behind = next(steps, None)
    return behind is not None and behind.opname in _METHODS and behind.argval in _SHARING


def next_write(code: CodeType, offset: int) -> str | None:
    """Return how the code behind an instruction writes to the tensor that it has put on the stack, None if not.

    Args:
        code: a function's code.
        offset: where the instruction stands.
    """
    behind = [step for step in dis.get_instructions(code) if step.offset > offset and step.opname not in _SKIPPED]
    if [(step.opname, step.argval) for step in behind[:2]] == [("COPY", 1), ("LOAD_ATTR", "data")]:
        return ".data = ..."  # from `layer.weight.data += x`
    way = ""
    while behind and behind[0].opname in _METHODS:
        name, behind = str(behind[0].argval), behind[1:]
        if name.endswith("_") and not name.endswith("__"):
            return None if name in NO_WRITES else f"{way}.{name}()"
        if name == "detach" and behind and behind[0].opname == "CALL" and behind[0].arg == 0:
            name, behind = "detach()", behind[1:]
        elif name != "data":
            return None
        way += f".{name}"
    if behind and behind[0].opname == "STORE_ATTR" and behind[0].argval == "data":
        return f"{way}.data = ..."
    return f"{way}[...] = ..." if _is_stored_into(behind) else None


def _is_stored_into(behind: Sequence[dis.Instruction]) -> bool:
    """Whether the tensor on the stack is the container of ``tensor[key] = value``, whose key is computed last.

    ``tensor[key] += value`` copies both for later.
    """
    height = 0
    for step in behind:
        if step.opname == "COPY":
            return step.arg == height + 1 > 1
        if step.opname in _STORES:
            return height == _STORES[step.opname]
        if not step.opname.startswith(_KEY_PARTS):
            return False
        height += dis.stack_effect(step.opcode, step.arg)
        if height < 0:
            return False
    return False
