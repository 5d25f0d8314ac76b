"""Optimizers that write to parameters without telling autograd: the fused ones of torch, and those of other libraries.

What is derived from a parameter (its quantized form, its range, the scale that a learned step stands for) is kept until
the parameter's version counter advances. Most optimizers advance it by themselves; ``fused=True`` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__: list[str] = []


def _advance_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    written = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.autograd.graph.increment_version(written)


register_optimizer_step_post_hook(_advance_versions)
