"""How the float networks of the accuracy benchmarks are trained: each as its kind usually is.

``adam`` is Adam with a linear decay to zero. ``gpt`` is the recipe of GPT-2 and GPT-3: small normal weights, smaller
ones on what is added to the residual stream, AdamW with weight decay 0.1 on matrices, gradients clipped at 1, a warm-up
and a cosine decay to a tenth. The rate and the number of steps are those that plain Adam had here before.

The recipe decides what is measured: claims about pruning language models are about weights that were trained so. With
Adam from PyTorch's own initialisation (embeddings of deviation 1, no decay) the same transformer reached 1.384 in
place of 1.395 nats, and Wanda at 60 % lost 0.024 ± 0.015 nats (five seeds) more than magnitude in whole tensors, most
of it in the first attention layer, and as much as magnitude in rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _qat_tasks import CharTransformer, loss_of, train
from torch import nn

__all__ = ["RECIPES", "pretrain"]

RECIPES = {"digits": "adam", "characters": "gpt"}
WARM_UP = 100


def pretrain(task: str, model: nn.Module, batches: list[Any], rate: float) -> None:
    """Train the network of a task over all batches, by the recipe in ``RECIPES``."""
    if RECIPES[task] == "adam":
        train(model, batches, [{"params": model.parameters(), "lr": rate}])
        return
    assert isinstance(model, CharTransformer)
    _initialise(model)
    _train_as_gpt(model, batches, rate)


def _initialise(model: CharTransformer) -> None:
    """Start as GPT-2 does: Radford et al. (2019), section 2.3, and its released code."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            residual = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(model.blocks)) if residual else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def _train_as_gpt(model: nn.Module, batches: list[Any], rate: float) -> None:
    """Train with the settings of GPT-3: Brown et al., arXiv 2005.14165, appendix B."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))

    def share(step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, len(batches) - WARM_UP))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
