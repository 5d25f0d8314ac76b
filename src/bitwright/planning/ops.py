"""Which ops a compressor acts on, and the axes of the weights that they consume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bitwright.program import Op, StateTensor

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

# A 1-D state of these ops is a norm's gain or a layer scale, never a weight matrix.
_GAIN_OPS = frozenset(
    {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "__rsub__", "rsub"}
    | {"layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm"}
)

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
        "bmm": "bmm",
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


def default_weight_axes(state: StateTensor) -> WeightAxes | None:
    """Return the default axes that the ops consuming ``state`` agree on, None when no consumer has any.

    Raises:
        AxisConflictError: two consumers disagree; names both.
    """
    found: dict[WeightAxes, str] = {}
    for use in state.uses:
        axes = _WEIGHT_AXES.get(use.op.type)
        if axes is not None and use.index > 0:
            found.setdefault(axes, f"{use.op.type} ({use.op.name})")
    if not found and state.tensor.ndim >= 2:
        found = {axes: use.op.name for use in state.uses if (axes := _WEIGHT_AXES.get(use.op.type)) is not None}
    if len(found) > 1:
        consumers = " and ".join(found.values())
        raise AxisConflictError(
            f"Conflicting default axes for {state.name!r}: it is consumed by {consumers}. Set the axis in its spec."
        )
    return next(iter(found), None)


def is_elementwise_gain(state: StateTensor) -> bool:
    """True for a state of at most one dimension that ops only scale or shift activations by."""
    return state.tensor.ndim <= 1 and all(use.op.type in _GAIN_OPS for use in state.uses)


def state_keys(state: StateTensor, op: Op | None) -> tuple[str, ...]:
    """Return the keys under which a spec for ``state`` is looked up: its local names, then the role it plays in ``op``.

    The role ``"weight"`` is added for ops whose modules name their weights otherwise (attention, RNNs).
    """
    keys = state.attributes
    if op is not None and op.type in ROLE_NAMED_OPS and state.tensor.ndim >= 2 and "weight" not in keys:
        named = {use.name for use in state.uses if use.op is op}
        if named & _ROLE_WEIGHTS or named == {"weight"} or op.type in _RNNS:
            return ("weight", *keys)
    return keys
