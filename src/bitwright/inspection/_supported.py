"""Which ops a compressor knows, and the type that its configuration calls them by."""

from __future__ import annotations

from torch import nn

from bitwright.base_model_compressor import _BaseModelCompressor
from bitwright.config.matching import resolve_module_rules
from bitwright.planning.chains import find_chains
from bitwright.planning.ops import PALETTIZER_OPS, PRUNER_OPS, QUANTIZER_EAGER_OPS
from bitwright.program import Op, Program
from bitwright.quantization.config import ExecutionMode

__all__ = ["check_compressor", "supported_op_types"]


def check_compressor(compressor: type[_BaseModelCompressor] | None, mode: ExecutionMode) -> None:
    """Check that the ops of a compressor are known.

    Raises:
        ValueError: they are not, or the compressor does not work in this mode.
    """
    if compressor is None:
        return
    kind = _kind(compressor)
    if kind is None:
        raise ValueError(
            f"Unsupported compressor class {compressor!r}; choose Quantizer, KMeansPalettizer or MagnitudePruner."
        )
    if mode == ExecutionMode.GRAPH and kind != "Quantizer":
        raise ValueError(f"{kind} is not supported in graph mode; inspect with execution_mode='eager'.")


def supported_op_types(
    compressor: type[_BaseModelCompressor] | None, program: Program, model: nn.Module
) -> dict[int, str] | None:
    """Return the op types of the ops that ``compressor`` knows, by ``id``; None without a compressor."""
    if compressor is None:
        return None
    kind = _kind(compressor)
    if kind == "Quantizer" and program.mode == "graph":
        from bitwright.quantization.config import QuantizerConfig

        chains = find_chains(program, resolve_module_rules(QuantizerConfig(), model))
        return {id(chain.primary): chain.primary.type for chain in chains}
    found = {id(op): _eager_type(kind, op) for op in program.ops}
    return {key: name for key, name in found.items() if name is not None}


def _eager_type(kind: str | None, op: Op) -> str | None:
    if kind == "Quantizer":
        return QUANTIZER_EAGER_OPS.get(op.type)
    if kind == "MagnitudePruner":
        return PRUNER_OPS.get(op.type)
    from bitwright.palettization.kmeans.supported_ops_registry import _KMeansPalettizerSupportedOpsRegistry

    return PALETTIZER_OPS.get(op.type) or _KMeansPalettizerSupportedOpsRegistry.key_for_func(op.target)


def _kind(compressor: object) -> str | None:
    names = {cls.__name__ for cls in getattr(compressor, "__mro__", ()) if cls.__module__.startswith("bitwright.")}
    return next((name for name in ("Quantizer", "KMeansPalettizer", "MagnitudePruner") if name in names), None)
