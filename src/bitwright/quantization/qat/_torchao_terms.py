"""The terms of torchao's fake-quantize configs, however spelled: dtypes, granularities, mapping types, domains."""

from __future__ import annotations

from typing import Any

import torch

from bitwright import _torchao
from bitwright.quantization.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerTokenGranularity,
    QuantizationGranularity,
)

__all__ = [
    "integer_dtype",
    "own_granularity",
    "read_granularity",
    "read_mapping_type",
    "read_zero_point_domain",
    "torchao_granularity",
]

_DTYPES = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 9))
_STRINGS = ("per_token", "per_channel", "per_group")


def integer_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of integers of 1 to 8 bits; torchao's own enumeration of them is read too.

    Raises:
        ValueError: another dtype.
    """
    if type(dtype).__name__ == "TorchAODType":
        dtype = getattr(torch, dtype.name.lower())
    if dtype not in _DTYPES:
        raise ValueError(f"Unsupported dtype '{dtype}', choose from {list(_DTYPES)}")
    chosen: torch.dtype = dtype
    return chosen


def read_granularity(granularity: Any, group_size: int | None) -> Any:
    """Return torchao's granularity for how it was written: a string, an object of torchao's or ours, or a group size.

    Raises:
        ValueError: none or two were given, or integers have no such granularity.
    """
    if group_size is not None and granularity is not None and granularity != "per_group":
        raise ValueError(f"`group_size` conflicts with granularity '{granularity}'; give one of the two.")
    if granularity is None and group_size is None:
        raise ValueError("At least one of `granularity` or `group_size` must be set")
    if granularity == "per_token":
        return _torchao.granularity("PerToken")
    if granularity == "per_channel":
        return _torchao.granularity("PerAxis", 0)
    if granularity is None or granularity == "per_group":
        if group_size is None:
            raise ValueError("granularity was 'per_group' but no `group_size` was set")
        granularity = _torchao.granularity("PerGroup", group_size)
    if isinstance(granularity, str):
        raise ValueError(f"Unexpected granularity: '{granularity}', must be one of {list(_STRINGS)}")
    if isinstance(granularity, QuantizationGranularity):
        granularity = torchao_granularity(granularity)
    if type(granularity).__name__ not in ("PerToken", "PerAxis", "PerGroup"):
        raise ValueError(f"Granularity '{granularity}' is not supported; use PerToken(), PerAxis(0) or PerGroup(n).")
    if type(granularity).__name__ == "PerAxis" and granularity.axis != 0:
        raise ValueError(f"Only axis=0 is supported for PerAxis granularity, got axis={granularity.axis!r}.")
    if type(granularity).__name__ == "PerGroup":
        size = granularity.group_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"`group_size` must be a positive integer, got {size!r}.")
    return granularity


def read_mapping_type(mapping_type: Any, is_symmetric: bool | None) -> Any:
    """Return torchao's mapping type for its name, itself, or ``is_symmetric``; symmetric where nothing is said.

    Raises:
        ValueError: two were given, or an unknown one.
    """
    if mapping_type is not None and is_symmetric is not None:
        raise ValueError("Cannot set both `mapping_type` and `is_symmetric`")
    if mapping_type is None:
        return _torchao.mapping_type("ASYMMETRIC" if is_symmetric is False else "SYMMETRIC")
    name = mapping_type.upper() if isinstance(mapping_type, str) else getattr(mapping_type, "name", None)
    if name not in ("SYMMETRIC", "ASYMMETRIC"):
        raise ValueError(f"MappingType '{mapping_type}' is not supported")
    return _torchao.mapping_type(name)


def read_zero_point_domain(domain: Any) -> Any:
    """Return torchao's zero-point domain for its name or itself.

    Raises:
        ValueError: an unknown one.
    """
    if domain is None:
        raise ValueError("Please use ZeroPointDomain.NONE instead of None")
    name = domain.upper() if isinstance(domain, str) else getattr(domain, "name", None)
    if name not in ("INT", "FLOAT", "NONE"):
        raise ValueError(f"`zero_point_domain` must be INT, FLOAT or NONE, got {domain!r}.")
    return _torchao.zero_point_domain(name)


def own_granularity(granularity: Any) -> QuantizationGranularity:
    """Return our granularity for one of torchao's."""
    kind = type(granularity).__name__
    if kind == "PerToken":
        return PerTokenGranularity()
    if kind == "PerAxis":
        return PerChannelGranularity(axis=granularity.axis)
    return PerBlockGranularity(axis=-1, block_size=granularity.group_size)


def torchao_granularity(granularity: QuantizationGranularity) -> Any:
    """Return torchao's granularity for one of ours.

    Raises:
        ValueError: it has none.
    """
    if isinstance(granularity, PerTokenGranularity):
        return _torchao.granularity("PerToken")
    if isinstance(granularity, PerChannelGranularity) and granularity.axis in (None, 0):
        return _torchao.granularity("PerAxis", 0)
    if isinstance(granularity, PerBlockGranularity):
        size = granularity.block_size
        if isinstance(size, tuple) and len(size) == 2 and size[0] == 1:
            size = size[1]
        if isinstance(size, int) and size > 0 and granularity.axis in (None, 1, -1):
            return _torchao.granularity("PerGroup", size)
    raise ValueError(
        f"granularity {granularity!r} has no counterpart in a FakeQuantizeConfig, which knows per token, per channel "
        "along axis 0, and per group along the last axis of a matrix."
    )
