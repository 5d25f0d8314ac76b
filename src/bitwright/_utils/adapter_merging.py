"""PEFT's adapters, which write their update into the weight that they adapt, and take it out again."""

from __future__ import annotations

import sys
from types import FrameType

from torch.compiler import is_compiling

__all__ = ["is_merging", "is_unloading", "peft_is_in_use"]

_WRITERS = ("merge", "unmerge", "set_base_weight")


def is_merging(caller: FrameType) -> bool:
    """Return whether a method of PEFT that writes through ``layer.weight.data`` is asking for the weight.

    It must get the parameter itself: what it writes into a simulated weight would be gone with the next forward.
    """
    if not _is_of_peft(caller):
        return False
    for_another = caller.f_code.co_name == "get_base_weight"
    asking = caller.f_back if for_another else caller
    return asking is not None and asking.f_code.co_name in _WRITERS


def is_unloading(caller: FrameType) -> bool:
    """Return whether a method of PEFT that takes an adapter off a layer gives the layer the weight that it has."""
    return caller.f_code.co_name == "_replace_module" and _is_of_peft(caller)


def _is_of_peft(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("peft.")


def peft_is_in_use() -> bool:
    """Return whether anybody has imported PEFT, outside of what ``torch.compile`` traces."""
    return "peft" in sys.modules and not is_compiling()
