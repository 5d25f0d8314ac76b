"""Enumerations, errors and warnings shared by all compressors."""

from __future__ import annotations

import enum
import warnings
from typing import Any, ClassVar, Self

__all__ = [
    "CompressionType",
    "CoreMLExportError",
    "DependencyVersionWarning",
    "ExportBackend",
    "TorchaoTorchIncompatibilityWarning",
    "UntestedTorchVersionWarning",
]


class _DeprecatedMemberEnumMeta(enum.EnumMeta):
    """Metaclass for string enums whose members once had other names.

    The class declares ``__deprecated_aliases__ = {"OLD": "NEW"}``. ``Cls.OLD`` and ``Cls("old")`` (any case) give
    ``Cls.NEW`` and emit a ``DeprecationWarning``.

    Raises:
        TypeError: the alias table is missing or empty.
        ValueError: an alias names a member that does not exist, or hides one that does.
    """

    def __new__(
        metacls, name: str, bases: tuple[type, ...], namespace: Any, **kwargs: Any
    ) -> _DeprecatedMemberEnumMeta:
        cls = super().__new__(metacls, name, bases, namespace, **kwargs)
        aliases = cls.__dict__.get("__deprecated_aliases__")
        if not aliases:
            raise TypeError(f"{name} must define a non-empty __deprecated_aliases__ mapping of old to new names.")
        for old, new in aliases.items():
            if new not in cls.__members__:
                raise ValueError(f"Deprecated alias {old!r} of {name} points at unknown member {new!r}.")
            if old in cls.__members__:
                raise ValueError(f"Deprecated alias {old!r} of {name} hides the member of the same name.")
        return cls

    def _resolve_deprecated(cls, old: str, written: str) -> Any:
        aliases: dict[str, str] = cls.__dict__["__deprecated_aliases__"]
        new = aliases[old]
        warnings.warn(f"{written} is deprecated, use {cls.__name__}.{new} instead.", DeprecationWarning, stacklevel=3)
        return cls.__members__[new]

    def __getattr__(cls, name: str) -> Any:
        if name in cls.__dict__.get("__deprecated_aliases__", {}):
            return cls._resolve_deprecated(name, f"{cls.__name__}.{name}")
        raise AttributeError(name)

    def __call__(cls, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str) and not args and not kwargs and value not in cls._value2member_map_:
            for old in cls.__dict__.get("__deprecated_aliases__", {}):
                if value.upper() == old.upper():
                    return cls._resolve_deprecated(old, f"{cls.__name__}({value!r})")
        return super().__call__(value, *args, **kwargs)


class ExportBackend(enum.StrEnum, metaclass=_DeprecatedMemberEnumMeta):
    """Target of ``finalize``. Values are strings, so that ``finalize(backend="coreml")`` works too.

    Attributes:
        Torch: plain PyTorch, for evaluation: weights are ordinary tensors with the values that they are compressed to,
            activations stay simulated.
        CoreML: what coremltools converts.
        CoreAI: what coreai-torch converts.
    """

    __deprecated_aliases__: ClassVar[dict[str, str]] = {"MIL": "CoreML", "MLIR": "CoreAI"}

    Torch = "torch"
    _TORCH = "_torch"  # all simulators stay where they are
    CoreML = "coreml"
    CoreAI = "coreai"

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        raise ValueError(
            f"{value!r} is not a valid ExportBackend. Use one of {[member.value for member in cls]}, or its member."
        )


class CompressionType(enum.StrEnum):
    """Technique that a spec belongs to."""

    QUANTIZATION = "quantization"
    PALETTIZATION = "palettization"
    PRUNING = "pruning"

    def to_coreml_code(self) -> int:
        """Return Core ML's metadata code: 3 quantization, 2 palettization, 1 pruning.

        Raises:
            ValueError: Core ML has no code for this technique.
        """
        try:
            return _COREML_CODES[self]
        except KeyError:
            raise ValueError(f"Core ML has no compression code for {self.value!r}.") from None


_COREML_CODES = {
    CompressionType.QUANTIZATION: 3,
    CompressionType.PALETTIZATION: 2,
    CompressionType.PRUNING: 1,
}


_CORE_AI_TAKES_IT = "Use ExportBackend.CoreAI, which supports it."


class CoreMLExportError(ValueError):
    """The model uses something that Core ML cannot hold.

    Args:
        message: what, and where.
        remedy: what to do; the default proposes the Core AI backend.
    """

    def __init__(self, message: str, remedy: str = _CORE_AI_TAKES_IT) -> None:
        super().__init__(f"{message} {remedy}")

    @classmethod
    def from_dtype(cls, dtype: object, context: str) -> Self:
        """Build the error for a dtype that Core ML does not support in ``context``."""
        return cls(f"CoreML export does not support dtype {dtype} on {context}.")

    @classmethod
    def from_config(cls, config: object, context: str, remedy: str = _CORE_AI_TAKES_IT) -> Self:
        """Build the error for a configuration object (named by its type) that Core ML does not support."""
        return cls(f"CoreML export does not support {type(config).__name__} on {context}.", remedy)


class DependencyVersionWarning(UserWarning):
    """A dependency's version lies outside what was tested."""


class UntestedTorchVersionWarning(DependencyVersionWarning):
    """torch is newer than the newest version tested."""


class TorchaoTorchIncompatibilityWarning(DependencyVersionWarning):
    """The installed torchao and torch do not fit together."""
