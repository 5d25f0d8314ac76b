"""What graph quantization knows about each op: is it quantized, what fuses behind it, what may share parameters."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from bitwright.program import Op, Value
from bitwright.program.aten_names import canonical_name

if TYPE_CHECKING:
    from .slots import Slot

__all__ = [
    "ACTIVATIONS",
    "OpRole",
    "Passthrough",
    "computes_in_floats",
    "is_float",
    "is_quantized",
    "only_moves",
    "passthrough_of",
    "role_of",
]


@dataclass(frozen=True, slots=True)
class OpRole:
    """How an op is quantized.

    Attributes:
        pattern: key of the kind of op; ``op_type_config`` takes it too (``"conv"``, ``"maxpool"``).
        takes_batch_norm: a batch norm right behind it is part of it.
        takes_activation: an activation function right behind it, or behind that batch norm, is part of it.
        shares: output and inputs hold the same values, so that they have one set of parameters.
        inputs: positions of the inputs that ``"*"`` speaks about; None for all.
        outputs: how many outputs ``"*"`` speaks about; None for all.
        sharing: which slots of an op that shares belong together, each time with True for one simulator and False
            for one dtype; None for all of them.
    """

    pattern: str
    takes_batch_norm: bool = False
    takes_activation: bool = False
    shares: bool = False
    inputs: tuple[int, ...] | None = None
    outputs: int | None = None
    sharing: Callable[[Op, Sequence[Slot]], list[tuple[list[int], bool]]] | None = None


class Passthrough(enum.Enum):
    """An op that moves values without changing them, and is not quantized for its own sake."""

    SAME_RANK = "same rank"  # one simulator may stand on both sides
    OTHER_RANK = "other rank"  # what is known about the values holds on both sides


ACTIVATIONS = frozenset(
    {"relu", "relu6", "leaky_relu", "silu", "elu", "celu", "selu", "mish", "hardtanh", "hardswish", "hardsigmoid"}
    | {"gelu", "sigmoid", "logsigmoid", "tanh"}
)
"""Activation functions that are part of the op in front of them."""

_DIMS = (1, 2, 3)
_WEIGHTED = {"takes_batch_norm": True, "takes_activation": True, "inputs": (0,)}
_CONV = OpRole("conv", **_WEIGHTED)  # type: ignore[arg-type]
_CONV_TRANSPOSE = OpRole("conv_transpose", **_WEIGHTED)  # type: ignore[arg-type]
_MATMUL = OpRole("matmul", takes_activation=True)
_MAXPOOL = OpRole("maxpool", shares=True, outputs=1)
_AVGPOOL = OpRole("avgpool", shares=True)
_NORM = {"inputs": (0,), "outputs": 1}
_RNN = OpRole("rnn", inputs=(0,), outputs=1)
_CONCAT = OpRole("concat", shares=True)
_SPLIT = OpRole("split", shares=True)

_ROLES: Mapping[str, OpRole] = MappingProxyType(
    {
        **{f"conv{d}d": _CONV for d in _DIMS},
        **{f"conv_transpose{d}d": _CONV_TRANSPOSE for d in _DIMS},
        "linear": OpRole("linear", **_WEIGHTED),  # type: ignore[arg-type]
        "addmm": OpRole("addmm", takes_activation=True),
        "embedding": OpRole("embedding", inputs=()),
        "matmul": _MATMUL,
        "mm": _MATMUL,
        "bmm": _MATMUL,
        "baddbmm": OpRole("baddbmm", takes_activation=True),
        "grouped_mm": OpRole("grouped_mm", inputs=(0,)),
        "einsum": OpRole("einsum", takes_activation=True),
        "add": OpRole("add", takes_activation=True),
        "mul": OpRole("mul", takes_activation=True),
        "sub": OpRole("sub"),
        "rsub": OpRole("sub"),
        "div": OpRole("div"),
        "flatten": OpRole("flatten", shares=True),
        **{f"max_pool{d}d": _MAXPOOL for d in _DIMS},
        **{f"adaptive_max_pool{d}d": _MAXPOOL for d in _DIMS},
        **{f"avg_pool{d}d": _AVGPOOL for d in _DIMS},
        **{f"adaptive_avg_pool{d}d": _AVGPOOL for d in _DIMS},
        "mean": _AVGPOOL,
        "cat": _CONCAT,
        "stack": _CONCAT,
        "split": _SPLIT,
        "chunk": _SPLIT,
        "unbind": _SPLIT,
        "interpolate": OpRole("interpolate", shares=True, inputs=(0,)),
        "softmax": OpRole("softmax"),
        **{name: OpRole(name, **_NORM) for name in ("layer_norm", "rms_norm", "group_norm")},  # type: ignore[arg-type]
        "scaled_dot_product_attention": OpRole("scaled_dot_product_attention", inputs=(0, 1, 2)),
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RNN),
        **{name: OpRole("act") for name in ACTIVATIONS},
    }
)

_SAME_RANK = frozenset(
    {"clone", "dropout", "feature_dropout", "permute", "slice", "t", "transpose", "contiguous", "numpy_T", "mT"}
    | {"swapaxes", "movedim", "flip", "roll"}
)
_OTHER_RANK = frozenset(
    {"expand", "expand_as", "reshape", "select", "squeeze", "unsqueeze", "view", "unflatten", "view_as", "reshape_as"}
)
_PASSTHROUGH: Mapping[str, Passthrough] = MappingProxyType(
    {**dict.fromkeys(_SAME_RANK, Passthrough.SAME_RANK), **dict.fromkeys(_OTHER_RANK, Passthrough.OTHER_RANK)}
)


def role_of(op: Op) -> OpRole | None:
    """Return how ``op`` is quantized, None for an op that is left alone."""
    return _ROLES.get(canonical_name(op.type))


def is_quantized(op_type: str) -> bool:
    """Whether ops of this type are quantized."""
    return canonical_name(op_type) in _ROLES


def passthrough_of(op: Op) -> Passthrough | None:
    """Return how ``op`` moves values, None if it changes them or is not known."""
    return _PASSTHROUGH.get(canonical_name(op.type))


_IN_FLOATS = frozenset(
    {"softmax", "layer_norm", "rms_norm", "group_norm", "scaled_dot_product_attention", "split", "div", "act"}
)


def computes_in_floats(role: OpRole) -> bool:
    """True for ops without integer kernels, which need no scale right at their inputs."""
    return role.pattern in _IN_FLOATS


def only_moves(op: Op) -> bool:
    """True for an op whose results are numbers of its first argument as they are, in training too."""
    if "dropout" in op.type:
        return False
    return passthrough_of(op) is not None or _ROLES.get(canonical_name(op.type)) is _SPLIT


def is_float(value: Value) -> bool:
    """True for a tensor of real numbers wide enough to be fake-quantized."""
    return value.dtype.is_floating_point and value.dtype.itemsize > 1
