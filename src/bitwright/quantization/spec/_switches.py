"""On/off switches that are Python attributes for speed and buffers for the state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from bitwright._utils.direct_calls import DirectlyCalled
from bitwright.kernels.dispatch import is_plain_torch

__all__ = ["SwitchedModule"]

# The attribute that each buffer is read into.
_SWITCHES = {"observer_enabled": "_observer_on", "fake_quant_enabled": "_fake_quant_on", "_disabled": "_is_off"}


class _Seen(tuple[Any, ...]):
    """The buffers that were read last; none in copies and pickles, whose buffers count their versions anew."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[_Seen], tuple[Any, ...]]:
        return _Seen, ((None,) * len(self),)

    def __deepcopy__(self, memo: Any) -> _Seen:
        return _Seen((None,) * len(self))


class SwitchedModule(DirectlyCalled):
    """A simulator that can observe, fake-quantize, or be out of use.

    What ``forward`` asks is ``_observer_on``, ``_fake_quant_on`` and ``_is_off``. The buffers ``observer_enabled``,
    ``fake_quant_enabled`` and ``_disabled`` hold the same for checkpoints and for code that writes them directly. A
    write is noticed by the buffer's version counter, so the buffers, which may live on a GPU, are read only after one.
    What counts no version, such as a write through ``.data``, is noticed on the CPU, by :meth:`read_switches`.
    """

    fake_quant_enabled: torch.Tensor
    observer_enabled: torch.Tensor
    _disabled: torch.Tensor

    _observer_on: bool
    _fake_quant_on: bool
    _is_off: bool
    _seen: tuple[Any, ...]
    _seen_version: int

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode(False):  # tensors made in inference mode have no version counter
            self.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8, device="cpu"))
            self.register_buffer("observer_enabled", torch.ones(1, dtype=torch.uint8, device="cpu"))
            self.register_buffer("_disabled", torch.tensor(False, device="cpu"))
        self._observer_on, self._fake_quant_on, self._is_off = True, True, False
        self._note_buffers()

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Turn quantization of what passes through on or off."""
        self._set_switch("fake_quant_enabled", enabled)

    def disable_fake_quant(self) -> None:
        """Let tensors pass through as they are."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Turn the gathering of statistics on or off."""
        self._set_switch("observer_enabled", enabled)

    def disable_observer(self) -> None:
        """Keep the quantization parameters as they are."""
        self.enable_observer(False)

    def is_observing(self) -> bool:
        """Return whether statistics are gathered."""
        self.read_switches()
        return self._observer_on

    def is_quantizing(self) -> bool:
        """Return whether what passes through is quantized."""
        self.read_switches()
        return self._fake_quant_on and not self._is_off

    def is_disabled(self) -> bool:
        """Return whether the simulator took itself out of use, because its blocks do not divide the tensor."""
        self.read_switches()
        return self._is_off

    def read_switches(self) -> None:
        """Take over what the buffers hold; on a GPU only after a write that counts a version."""
        self._sync_switches()
        if torch.compiler.is_compiling() or not is_plain_torch():
            return
        buffers = [self._buffers[name] for name in _SWITCHES]
        if any(type(buffer) is not torch.Tensor or buffer.device.type != "cpu" for buffer in buffers):
            return
        before = self._observer_on, self._fake_quant_on, self._is_off
        self._read_switches()
        if before != (self._observer_on, self._fake_quant_on, self._is_off):
            self._forget_shortcut()  # which looks at versions

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; a good time to look at the switches."""
        self.read_switches()
        return super().train(mode)

    def _set_switch(self, name: str, on: bool) -> None:
        self._sync_switches()
        buffer = self._buffers[name]
        assert buffer is not None
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            self._buffers[name] = torch.full_like(buffer, on)
        else:
            buffer.fill_(on)
        self.__dict__[_SWITCHES[name]] = bool(on)
        self._note_buffers()

    def _sync_switches(self) -> None:
        """Read the buffers if anybody has written to them or replaced them; costs well under a microsecond if not."""
        buffers = self._buffers
        observer, fake_quant, off = self._seen
        same = (
            buffers["observer_enabled"] is observer
            and buffers["fake_quant_enabled"] is fake_quant
            and buffers["_disabled"] is off
        )
        try:
            if same and observer._version + fake_quant._version + off._version == self._seen_version:
                return
        except RuntimeError:  # inference tensors have no version counter
            pass
        self._read_switches()

    def _read_switches(self) -> None:
        for (name, switch), default in zip(_SWITCHES.items(), (True, True, False), strict=True):
            buffer = self._buffers[name]
            known = buffer is not None and buffer.device.type != "meta"
            self.__dict__[switch] = bool(buffer.item()) if buffer is not None and known else default
        self._note_buffers()

    def _move_switches(self, device: torch.device) -> None:
        """Have the buffers where the tensors are, so that those of a model on a GPU are there, as DDP wants them."""
        with torch.inference_mode(False):
            for name, switch in _SWITCHES.items():
                buffer = self._buffers[name]
                if buffer is not None and buffer.device != device:
                    self._buffers[name] = torch.full_like(buffer, self.__dict__[switch], device=device)
        self._note_buffers()

    def _note_buffers(self) -> None:
        own, buffers = self.__dict__, self._buffers  # nn.Module's own way to set an attribute is a long one
        own["_seen"] = seen = _Seen([buffers[name] for name in _SWITCHES])
        own["_seen_version"] = sum([0 if b is None or b.is_inference() else b._version for b in seen])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._read_switches()
