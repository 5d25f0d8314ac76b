"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

import re

__all__ = ["normalize_module_fqn"]

_ROOT = re.compile(r"L\['(?:self|fn|args)'\](?:\[\d+\])?")
_STEP = re.compile(r"_modules\['(?P<name>[^']+)'\]|\[(?P<number>\d+)\]|(?P<attribute>[^.\[\]]+)")


def normalize_module_fqn(path: str) -> str:
    """Return the dotted path of a module that ``torch.export`` wrote as an expression.

    Example:
        >>> normalize_module_fqn("L['self']._modules['layers'].block[0].norm")
        'layers.block.0.norm'
    """
    root = _ROOT.match(path)
    steps = _STEP.finditer(path, 0 if root is None else root.end())
    return ".".join(step["name"] or step["number"] or step["attribute"] for step in steps)
