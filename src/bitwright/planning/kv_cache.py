"""Specs for what cache-update ops write into a key-value cache."""

from __future__ import annotations

import difflib
from typing import Any

from bitwright.program import Op, Program, Value

from .empty_activations import is_empty
from .graph_boundaries import override
from .graph_ops import is_float
from .plan import Problem, Severity
from .reconcile import Group
from .slots import Demand, SlotTable

__all__ = ["apply_kv_caches", "tensor_inputs"]

_STRONGEST = -2


def apply_kv_caches(config: Any, program: Program, table: SlotTable, groups: list[Group]) -> list[Problem]:
    """Give the chosen input of each cache-update op its spec, whatever else the configuration says about it.

    Ops are chosen by name without namespace (``"key_cache_update"``), inputs by position among the op's tensors.
    ``groups`` is changed in place.
    """
    problems: list[Problem] = []
    for name, cache in (config.kv_cache_quant_configs or {}).items():
        where = f"kv_cache_quant_configs[{name!r}]"
        ops = [op for op in program.ops if name == op.type or name in op.aliases]
        if not ops:
            problems.append(Problem("kv-cache", where, _unknown(name, program), Severity.ERROR))
        for op in ops:
            problems += _apply(where, cache, op, table, groups)
    return problems


def _apply(where: str, cache: Any, op: Op, table: SlotTable, groups: list[Group]) -> list[Problem]:
    inputs = tensor_inputs(op)
    index = cache.quant_input_idx
    if index >= len(inputs) or not is_float(inputs[index]):
        found = [f"{i}: {value.name} ({value.dtype})" for i, value in enumerate(inputs)]
        message = (
            f"op_input_spec names input {index} of {op.name}, which is out of range or no floating-point tensor; its "
            f"inputs are {found}."
        )
        return [Problem("kv-cache", where, message, Severity.ERROR)]
    if is_empty(inputs[index]):
        table.empty.append(op.name)
        return []
    (spec,) = cache.op_quantizer_config.op_input_spec.values()
    override([table.add_input(op, inputs[index])], Demand(spec, _STRONGEST, where, op.module_path), groups)
    return []


def tensor_inputs(op: Op) -> list[Value]:
    """Return the different tensors that ``op`` reads, in the order of its arguments."""
    return list({id(argument.value): argument.value for argument in op.arguments}.values())


def _unknown(name: str, program: Program) -> str:
    names = sorted({op.type for op in program.ops})
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else f" Its ops are {names}."
    return f"The exported graph has no op of this name.{hint}"
