"""A small technique that exists only in tests: every level of config, and a model to apply it to."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from bitwright.common import CompressionType
from bitwright.config import (
    CompressionConfig,
    CompressionSpec,
    ModuleCompressionConfig,
    OpCompressionConfig,
    WeightOnlyModuleValidationMixin,
    WeightOnlyOpValidationMixin,
)


class ToySpec(CompressionSpec):
    """A spec with one setting."""

    _compression_type = CompressionType.PRUNING
    level: int = 7


class ToyOpConfig(OpCompressionConfig[ToySpec]):
    """Defaults that differ for the three fields, so that a mix-up shows."""

    @classmethod
    def get_default_input_spec(cls) -> dict[str | int, ToySpec | None]:
        return {"*": ToySpec(level=1)}

    @classmethod
    def get_default_output_spec(cls) -> dict[str | int, ToySpec | None]:
        return {0: ToySpec(level=2)}

    @classmethod
    def get_default_state_spec(cls) -> dict[str, ToySpec | None]:
        return {"weight": ToySpec(level=3)}


class ToyModuleConfig(ModuleCompressionConfig[ToyOpConfig, ToySpec]):
    """A module config with settings of its own."""

    strength: float = 0.5
    mode: str = "plain"


class ToyConfig(CompressionConfig[ToyModuleConfig]):
    """A whole config."""

    _CONFIG_KEY: ClassVar[str] = "toy_config"
    _SPEC_KEY: ClassVar[str] = "toy_spec"


class WeightOnlyOpConfig(WeightOnlyOpValidationMixin, ToyOpConfig):
    """An op config that takes no activation specs."""

    @classmethod
    def get_default_input_spec(cls) -> dict[str | int, ToySpec | None]:
        return {}

    @classmethod
    def get_default_output_spec(cls) -> dict[str | int, ToySpec | None]:
        return {}


class WeightOnlyModuleConfig(WeightOnlyModuleValidationMixin, ModuleCompressionConfig[WeightOnlyOpConfig, ToySpec]):
    """A module config that takes no activation specs."""


def toy_module(strength: float, **fields: object) -> ToyModuleConfig:
    """A module config that is told apart by its strength."""
    return ToyModuleConfig.model_validate({"strength": strength, **fields})


class Block(nn.Module):
    """Two linears and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.down = nn.Linear(8, 4)


class ToyModel(nn.Module):
    """Embedding, two blocks in a list, and a head that is also reachable as ``output``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10)
        self.output = self.head
