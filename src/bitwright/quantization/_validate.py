"""Checks of a quantizer configuration that need no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitwright.config.matching import module_configs

from .config import ExecutionMode, QuantizerConfig

__all__ = ["check_config"]


def check_config(config: QuantizerConfig) -> None:
    """Refuse spec keys that have no meaning in the configuration's execution mode.

    Raises:
        NotImplementedError: a tensor of an op is named by a string (positions and ``"*"`` are known), or an output
            other than the first is in graph mode.
        TypeError: an entry is no module config.
    """
    graph = config.execution_mode == ExecutionMode.GRAPH
    for where, module_config in module_configs(config):
        for op_where, op_config in _op_configs(where, module_config):
            _refuse_names(f"{op_where}.op_input_spec", op_config.op_input_spec)
            _refuse_names(f"{op_where}.op_output_spec", op_config.op_output_spec)
            if graph:
                _refuse_other_outputs(f"{op_where}.op_output_spec", op_config.op_output_spec)


def _op_configs(where: str, module_config: Any) -> Iterator[tuple[str, Any]]:
    if module_config is None:
        return
    yield where, module_config
    for section in ("op_type_config", "op_name_config"):
        for key, entry in (getattr(module_config, section) or {}).items():
            if entry is not None:
                yield f"{where}.{section}[{key!r}]", entry


def _refuse_names(where: str, specs: Mapping[Any, Any] | None) -> None:
    for key in specs or {}:
        if isinstance(key, str) and key != "*":
            raise NotImplementedError(
                f"{where}: the key {key!r} names a tensor. Only integer indices or '*' are supported for an op."
            )


def _refuse_other_outputs(where: str, specs: Mapping[Any, Any] | None) -> None:
    for key in specs or {}:
        if key not in ("*", 0):
            raise NotImplementedError(
                f"{where}: op_output_qspec currently supports the keys 0 and '*' in graph mode, not {key!r}."
            )
