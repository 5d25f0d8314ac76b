"""Base of the simulators of palettization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from bitwright.common import CompressionType
from bitwright.config.spec import CompressionSimulatorBase

__all__: list[str] = []


class _FakePalettizeImplBase(CompressionSimulatorBase, ABC):
    """A simulator that maps a weight to what its indices and palettes decode to.

    Attributes:
        fake_palett_enabled: uint8 ``[1]`` buffer, 0 lets the dense weight through. What ``forward`` asks is a Python
            attribute that follows writes to the buffer.
        observer_enabled: uint8 ``[1]`` buffer that is not saved; 1 makes the palettes anew at every call.
    """

    compression_type: ClassVar[CompressionType] = CompressionType.PALETTIZATION

    fake_palett_enabled: torch.Tensor
    observer_enabled: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode(False):  # tensors made in inference mode have no version counter
            self.register_buffer("fake_palett_enabled", torch.ones(1, dtype=torch.uint8, device="cpu"))
            self.register_buffer("observer_enabled", torch.zeros(1, dtype=torch.uint8, device="cpu"), persistent=False)
        self._disabled = False
        self._enabled = True
        self._note_switch()

    @property
    def is_on(self) -> bool:
        """Whether weights are palettized."""
        if torch.compiler.is_compiling():  # buffers are symbols there
            return self._enabled
        buffer = self._buffers["fake_palett_enabled"]
        assert buffer is not None
        if buffer is not self._seen or (not buffer.is_inference() and buffer._version != self._seen_version):
            self._read_switch()
        return self._enabled

    def enable_fake_palett(self, enabled: bool = True) -> None:
        """Palettize what passes through, or let it pass as it is."""
        self.fake_palett_enabled.fill_(enabled)
        self._enabled = bool(enabled)
        self._note_switch()

    def disable_fake_palett(self) -> None:
        """Let weights pass through as they are."""
        self.enable_fake_palett(False)

    def is_disabled(self) -> bool:
        """Return whether the simulator took itself out of use, because its granularity does not fit the weight."""
        return self._disabled

    @abstractmethod
    def hard_assign(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with each vector replaced by its palette entry."""

    def _read_switch(self) -> None:
        if not self.fake_palett_enabled.is_meta:
            self._enabled = bool(self.fake_palett_enabled.item())
        self._note_switch()

    def _note_switch(self) -> None:
        self._seen = self.fake_palett_enabled
        self._seen_version = 0 if self._seen.is_inference() else self._seen._version

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._read_switch()
