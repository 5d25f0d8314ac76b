"""Which ops a compressor acts on, and the axes of the weights that they consume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bitwright.program import Argument, Op, StateTensor
from bitwright.program.aten_names import canonical_name

__all__ = [
    "EAGER_FAMILIES",
    "PALETTIZER_OPS",
    "PRUNER_OPS",
    "QUANTIZER_EAGER_OPS",
    "ROLE_NAMED_OPS",
    "AxisConflictError",
    "FunctionFamily",
    "WeightAxes",
    "default_weight_axes",
    "eager_op_key",
    "function_axes",
    "is_elementwise",
    "is_elementwise_gain",
    "operand_axes",
    "state_keys",
]


@dataclass(frozen=True, slots=True)
class WeightAxes:
    """Default axes of a weight: ``channel`` for one scale per output channel, ``block`` for blocks along the input."""

    channel: int
    block: int


_OUT_IN = WeightAxes(channel=0, block=1)
_IN_OUT = WeightAxes(channel=1, block=0)

_CONVS = tuple(f"conv{d}d" for d in (1, 2, 3))
_CONV_TRANSPOSES = tuple(f"conv_transpose{d}d" for d in (1, 2, 3))
_RNNS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_WEIGHT_AXES: Mapping[str, WeightAxes] = MappingProxyType(
    {
        **dict.fromkeys((*_CONVS, "linear", "embedding", "multi_head_attention_forward", *_RNNS), _OUT_IN),
        **dict.fromkeys((*_CONV_TRANSPOSES, "addmm"), _IN_OUT),
    }
)

# Matrix products, with the position of the second factor. A factor of shape (..., in, out) has its channels last.
_PRODUCTS: Mapping[str, int] = MappingProxyType({"matmul": 1, "mm": 1, "bmm": 1, "grouped_mm": 1, "baddbmm": 2})
_EXPERTS = frozenset({"grouped_mm", "bmm", "baddbmm"})
# Ops that multiply matrices; all others move or combine numbers, as learned tokens and tables of positions are read.
_CONTRACTIONS = frozenset({"einsum", *_PRODUCTS, *_WEIGHT_AXES})

# Ops whose weights carry module-specific names: the role "weight" finds them, their attribute names do too.
ROLE_NAMED_OPS = frozenset({"multi_head_attention_forward", *_RNNS})
_ROLE_WEIGHTS = frozenset(
    {"in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "weight"}
)

_WEIGHTED = (*_CONVS, *_CONV_TRANSPOSES, "linear", "addmm")

QUANTIZER_EAGER_OPS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in (*_WEIGHTED, "embedding", "max_pool2d", "adaptive_avg_pool2d", "matmul")},
        "add": "add",
        "add_": "add",
        "mul": "mul",
        "mul_": "mul",
        "sub": "sub",
        "sub_": "sub",
        "__rsub__": "sub",
        "div": "div",
        "div_": "div",
        "true_divide": "div",
        "mm": "matmul",
        "bmm": "bmm",
        "baddbmm": "baddbmm",
        "_grouped_mm": "grouped_mm",
        "grouped_mm": "grouped_mm",
        "einsum": "einsum",
        "cat": "cat",
        "concat": "cat",
        "concatenate": "cat",
        "softmax": "softmax",
        "layer_norm": "layer_norm",
        "scaled_dot_product_attention": "scaled_dot_product_attention",
        "multi_head_attention_forward": "multi_head_attention_forward",
        **{name: name for name in _RNNS},
    }
)
"""Function name to ``op_type_config`` key, eager quantization."""


@dataclass(slots=True)
class FunctionFamily:
    """The functions that one ``op_type_config`` key stands for; one that is taken out is no longer recognised."""

    ops: list[str]


EAGER_FAMILIES: Mapping[str, FunctionFamily] = MappingProxyType(
    {
        key: FunctionFamily([function for function, of in QUANTIZER_EAGER_OPS.items() if of == key])
        for key in dict.fromkeys(QUANTIZER_EAGER_OPS.values())
    }
)
"""``op_type_config`` key to its functions, eager quantization."""


def eager_op_key(function: str) -> str | None:
    """Return the ``op_type_config`` key of a function, None where eager quantization does not recognise it."""
    key = QUANTIZER_EAGER_OPS.get(function)
    return key if key is not None and function in EAGER_FAMILIES[key].ops else None


PALETTIZER_OPS: Mapping[str, str] = MappingProxyType(
    {name: name for name in (*_WEIGHTED, "embedding", "multi_head_attention_forward", *_RNNS)}
)
"""Function name to ``op_type_config`` key, palettization."""

PRUNER_OPS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in (*_WEIGHTED, "embedding", *_RNNS)},
        "multi_head_attention_forward": "multi_head_attention",
    }
)
"""Function name to ``op_type_config`` key, pruning."""


class AxisConflictError(ValueError):
    """Consumers of one weight call for different default axes."""


def function_axes(function: str) -> WeightAxes | None:
    """Return the default axes of the weight of a function (``"conv2d"``), None where it has none."""
    return _WEIGHT_AXES.get(function)


def operand_axes(use: Argument, *, products: bool = True) -> WeightAxes | None:
    """Return the axes of a tensor that an op reads as a weight, None where it reads it as anything else.

    Args:
        use: the argument.
        products: whether the second factor of a matrix product, or the first of a product by a matrix, counts.
    """
    axes = _WEIGHT_AXES.get(use.op.type)
    if axes is not None:
        return axes if use.index > 0 or len(use.value.shape) >= 2 else None
    rank = len(use.value.shape)
    second = _PRODUCTS.get(canonical_name(use.op.type)) if products and rank >= 2 else None
    if second is None or use.index not in (second, second - 1):
        return None
    if use.index == second:
        return WeightAxes(channel=rank - 1, block=rank - 2)
    return WeightAxes(channel=rank - 2, block=rank - 1)


def default_weight_axes(state: StateTensor, *, products: bool = False) -> WeightAxes | None:
    """Return the default axes that the ops consuming ``state`` agree on, None when no consumer has any.

    Args:
        state: the weight. Ops that read a view of it count too.
        products: whether matrix products give axes.

    Raises:
        AxisConflictError: two consumers disagree; names both.
    """
    found: dict[WeightAxes, str] = {}
    first: dict[WeightAxes, str] = {}
    for use in (*state.uses, *state.views):
        axes = _axes_in(state, use, products)
        if axes is not None:
            named = found if use.index > 0 else first
            named.setdefault(axes, f"{use.op.type} ({use.op.name})")
    found = found or first
    if len(found) > 1:
        consumers = " and ".join(found.values())
        path, _, attribute = state.name.rpartition(".")
        where = f" in module_name_configs[{path!r}]" if path else ""
        raise AxisConflictError(
            f"Conflicting default axes for {state.name!r}: it is consumed by {consumers}. Set the axis in its spec, "
            f"op_state_spec[{attribute!r}]{where}; one axis serves both."
        )
    return next(iter(found), None)


def _axes_in(state: StateTensor, use: Argument, products: bool) -> WeightAxes | None:
    axes = operand_axes(use, products=products)
    view = use.value.view
    if axes is None or view is None or use.value.state is state:
        return axes
    if max(axes.channel, axes.block) >= len(view.axes):
        return None
    return WeightAxes(view.axes[axes.channel], view.axes[axes.block])


def is_elementwise(state: StateTensor) -> bool:
    """True for a state that ops move, normalise or combine with activations, if at all, and never contract."""
    return all(canonical_name(use.op.type) not in _CONTRACTIONS for use in (*state.uses, *state.views))


def is_elementwise_gain(state: StateTensor) -> bool:
    """True for a state with numbers along one dimension only that no op reads as a weight (a norm's gain or bias)."""
    flat = state.tensor.numel() == max(state.tensor.shape, default=1)
    return flat and all(operand_axes(use) is None for use in (*state.uses, *state.views))


def state_keys(state: StateTensor, op: Op | None) -> tuple[str, ...]:
    """Return the keys under which a spec for ``state`` is looked up: its local names, then the role it plays in ``op``.

    The role ``"weight"`` is added where modules name their weights otherwise: attention, RNNs, the stacked weights of
    experts.
    """
    keys = state.attributes
    if op is None or state.tensor.ndim < 2 or "weight" in keys:
        return keys
    reads = [use for use in (*state.uses, *state.views) if use.op is op]
    if _is_expert_weight(state, reads) or _is_role_named(op, {use.name for use in reads}):
        return ("weight", *keys)
    return keys


def _is_role_named(op: Op, names: set[str]) -> bool:
    if ROLE_NAMED_OPS.isdisjoint((op.type, *op.aliases)):
        return False
    return bool(names & _ROLE_WEIGHTS) or op.type in _RNNS


def _is_expert_weight(state: StateTensor, reads: list[Argument]) -> bool:
    if not state.is_parameter or state.tensor.ndim != 3:
        return False
    return any((kind := canonical_name(use.op.type)) in _EXPERTS and use.index == _PRODUCTS[kind] for use in reads)
