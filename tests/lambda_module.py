"""A module for models that a test writes as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Lambda(nn.Module):
    """A module whose forward is a function of itself and the inputs."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
