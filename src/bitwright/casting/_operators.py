"""Facts about operators that the float pass needs: what stays in float32, what creates, what nests graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ._arguments import bound_arguments, sharing_memory, written_arguments
from ._cleanup import CAST_OPS, dtype_of
from ._numbers import fits_scalar
from ._reachable import reachable

_aten = torch.ops.aten

#: Families without a 16-bit kernel in PyTorch on CPU, found by running every operator of
#: ``torch.testing._internal``'s operator database in half precision (torch 2.13).
_FLOAT32_PREFIXES: Final = (
    *("linalg_", "_linalg_", "cholesky", "_fft_", "fft_", "special_", "_ctc_loss", "histogram", "_histogram"),
)
_FLOAT32_NAMES: Final = frozenset(
    {
        "_cdist_forward",
        "cdist",
        "pdist",
        "_pdist_forward",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "avg_pool3d",
        "geqrf",
        "multi_margin_loss",
        "multilabel_margin_loss_forward",
        "ormqr",
        "triangular_solve",
    }
)
_HAS_16_BIT_KERNEL: Final = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_vecdot"})

#: Operators whose result is a function of sizes and scalars only.
_CREATION_NAMES: Final = frozenset(
    {"arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "logspace", "new_full", "new_ones"}
    | {"new_zeros", "ones", "ones_like", "rand", "rand_like", "randn", "randn_like", "scalar_tensor", "zeros"}
    | {"zeros_like"}
)

#: Higher-order operators that only call their graphs: every tensor goes in and comes out as an operand.
_CALLING_OPS: Final = frozenset(
    {"cond", "while_loop", "scan", "map_impl", "associative_scan", "invoke_subgraph", "wrap_with_set_grad_enabled"}
    | {"strict_mode", "wrap_activation_checkpoint", "tag_activation_checkpoint", "wrap"}
)

#: Products and quotients: a factor among the subnormal numbers loses digits that the result needs.
_QUOTIENT_NAMES: Final = frozenset({"div", "true_divide", "divide"})
_PRODUCT_NAMES: Final = frozenset({"mul", "multiply", *_QUOTIENT_NAMES})

#: Arguments that are factors, of any operator and of some.
_FACTOR_ARGUMENTS: Final = frozenset({"alpha", "beta", "negative_slope"})
_FACTORS_OF: Final = {
    "addcdiv": ("value",),
    "addcmul": ("value",),
    "elu": ("scale", "input_scale"),
    "lerp": ("weight",),
}
#: Operators that make a tensor of one number, and those that hand it on as it is.
FILLED: Final = frozenset({"full", "full_like", "new_full", "scalar_tensor"})
_HANDING_ON: Final = frozenset({"where", "expand", "view", "unsqueeze", "neg", "clone", "alias"})

#: Operators that put a number into their result, or move their result by it.
_BOUNDING_NAMES: Final = frozenset(
    {"clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "clip", "clip_", "hardtanh", "hardtanh_"}
    | {"threshold", "threshold_", "maximum", "minimum", "fmax", "fmin", "where", "masked_fill", "masked_fill_"}
    | {"add", "add_", "sub", "sub_", "subtract", "rsub"}
)

#: Operators that put a number, as it is, beside other values.
_PLACING_NAMES: Final = frozenset(
    {"constant_pad_nd", "fill", "index_fill", "masked_fill", "nan_to_num", "pad", "scatter", "threshold", "where"}
)

#: Operators beyond the pointwise ones that turn integer operands into floats.
_PROMOTING_NAMES: Final = frozenset({"cat", "stack", "sum", "mean", "prod", "cumsum", "cumprod"})

#: Operators whose result holds elements of their first argument and nothing else.
MOVES: Final = (
    *("_unsafe_index", "_unsafe_view", "alias", "amax", "amin", "as_strided", "broadcast_to", "clone", "contiguous"),
    *("detach", "detach_", "diagonal", "expand", "expand_copy", "flatten", "flip", "gather", "index", "index_select"),
    *("lift_fresh", "lift_fresh_copy", "masked_select", "movedim", "narrow", "permute", "permute_copy", "repeat"),
    *("reshape", "roll", "select", "select_copy", "slice", "slice_copy", "squeeze", "t", "take", "take_along_dim"),
    *("tile", "transpose", "unflatten", "unfold", "unsqueeze", "view", "view_copy"),
)
#: The same, for several results.
SPLITS: Final = ("chunk", "split", "split_with_sizes", "unbind", "unsafe_split", "tensor_split")

#: Operators whose result reaches as far as their arguments do.
_KEEPS_MAGNITUDE: Final = frozenset(
    {*MOVES, *SPLITS, "cat", "stack", "neg", "abs", "relu", "where", "maximum", "minimum", "constant_pad_nd"}
    | {"_to_copy", "to", "masked_fill", "index_put", "scatter", "slice_scatter", "select_scatter", "sort", "topk"}
)


def op_name(node: Node) -> str:
    """Return the name of an operator without namespace and overload; empty for what is no operator."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return str(target.__name__) if isinstance(target, HigherOrderOperator) else ""


def lacks_16_bit_kernel(node: Node) -> bool:
    """Tell whether PyTorch has no float16 or bfloat16 kernel for the operator on CPU."""
    name = op_name(node)
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or name in _HAS_16_BIT_KERNEL:
        return False
    return name in _FLOAT32_NAMES or name.startswith(_FLOAT32_PREFIXES)


def keeps_magnitude(node: Node) -> bool:
    """Tell whether the result of the operator reaches as far as its arguments do."""
    return isinstance(node.target, OpOverload) and op_name(node) in _KEEPS_MAGNITUDE


def promoted_integers(node: Node) -> list[Node]:
    """Return the integer tensors that an operator on floats, or a cast to them, turns into floats; no indices."""
    if not isinstance(node.target, OpOverload):
        return []
    promotes = node.target in CAST_OPS or op_name(node) in _PROMOTING_NAMES
    if not promotes and torch.Tag.pointwise not in node.target.tags:
        return []
    dtypes = {source: dtype_of(source) for source in node.all_input_nodes}
    return [
        source
        for source, dtype in dtypes.items()
        if dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    ]


def is_creation(node: Node) -> bool:
    """Tell whether the operator makes a tensor out of sizes and scalars."""
    return isinstance(node.target, OpOverload) and op_name(node) in _CREATION_NAMES


def places_numbers(node: Node) -> bool:
    """Tell whether the numbers that the operator is given are values of its result."""
    return is_creation(node) or (isinstance(node.target, OpOverload) and op_name(node) in _PLACING_NAMES)


def exceeds(node: Node, dtype: torch.dtype) -> bool:
    """Tell whether the operator computes with a number beyond ``dtype`` that may take its result there, too."""
    divides = op_name(node).removesuffix("_") in _QUOTIENT_NAMES
    return not divides and any(not fits_scalar(value, dtype) for _, value in scalars(node))


def reinterprets_bits(node: Node) -> bool:
    """Tell whether the operator reads the bits of its argument as another dtype."""
    return node.target in (_aten.view.dtype, _aten.view_copy.dtype)


def is_graph_call(node: Node) -> bool:
    """Tell whether ``node`` is a higher-order operator that only calls its graphs (``cond``, ``scan``, ...)."""
    if not isinstance(node.target, HigherOrderOperator):
        return False
    if op_name(node) == "wrap_with_autocast":
        return node.args[2] is False
    return op_name(node) in _CALLING_OPS


def called_graphs(node: Node) -> Iterator[GraphModule]:
    """Yield the graphs that a higher-order operator calls."""
    owner = node.graph.owning_module
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and owner is not None:
            attribute = attribute_of(owner, str(argument.target))
            if isinstance(attribute, GraphModule):
                yield attribute


def _graph_behind(argument: Any) -> Graph:
    """Return the graph that an argument of a higher-order operator stands for."""
    module = attribute_of(argument.graph.owning_module, str(argument.target))
    if not isinstance(module, GraphModule):
        raise TypeError(f"{argument} stands for {type(module).__name__}, which is no graph.")
    return module.graph


def loop_end_sources(node: Node) -> list[Node]:
    """Return the operands of a ``while_loop`` from which it computes, in this step or a later one, whether to go on."""
    condition, body = (_graph_behind(argument) for argument in node.args[:2])
    places = _read_places(condition, condition.output_node().all_input_nodes)
    results = pytree.tree_leaves(body.output_node().args)
    before: set[int] = set()
    while places != before:
        # What decides in the next step is what the body puts in these places now.
        before = places
        decisive = [results[place] for place in places if place < len(results)]
        places = places | _read_places(body, [result for result in decisive if isinstance(result, Node)])
    operands = [operand for group in node.args[2:4] if isinstance(group, tuple | list) for operand in group]
    return [operand for place, operand in enumerate(operands) if place in places and isinstance(operand, Node)]


def _read_places(graph: Graph, results: Iterable[Node]) -> set[int]:
    """Return the numbers of the placeholders of ``graph`` from which ``results`` are computed."""
    writers: dict[Node, list[Node]] = {}
    for writer in graph.nodes:
        for memory in sharing_memory(written_arguments(writer)):
            writers.setdefault(memory, []).append(writer)
    reached = reachable(results, lambda inner: [*inner.all_input_nodes, *writers.get(inner, ())])
    placeholders = [inner for inner in graph.nodes if inner.op == "placeholder"]
    return {place for place, inner in enumerate(placeholders) if inner in reached}


def attribute_of(module: torch.nn.Module, target: str) -> Any:
    """Return the attribute that a ``get_attr`` node reads, by its dotted name."""
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def scalars(node: Node) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the Python numbers that enter the arithmetic of an operator.

    Sizes, axes and other numbers of the schema type ``int`` are no part of it.
    """
    for argument, value in bound_arguments(node):
        if "int" in str(argument.type):
            continue
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, int | float) and not isinstance(entry, bool):
                yield argument.name, entry


def bounds_results(node: Node) -> bool:
    """Tell whether the numbers that ``node`` is given, or that it makes or holds, bound or shift results."""
    if op_name(node) in _BOUNDING_NAMES:
        return True
    passes_on = node.op != "call_function" or is_creation(node) or op_name(node) in MOVES
    return passes_on and bool(node.users) and all(bounds_results(user) for user in node.users)


def _is_multiplied(node: Node) -> bool:
    """Tell whether a tensor of one number, or what hands it on, is a factor."""
    names = {user: op_name(user).removesuffix("_") for user in node.users}
    return any(name in _PRODUCT_NAMES or (name in _HANDING_ON and _is_multiplied(user)) for user, name in names.items())


def _is_factor(node: Node, argument: str) -> bool:
    """Tell whether an argument of an operator, in place or not, multiplies or divides others."""
    name = op_name(node).removesuffix("_")
    if name in FILLED:
        return _is_multiplied(node)
    return name in _PRODUCT_NAMES or argument in _FACTOR_ARGUMENTS or argument in _FACTORS_OF.get(name, ())


def unsuitable_scalar(node: Node, dtype: torch.dtype) -> str | None:
    """Say which scalar of ``node`` cannot be held in ``dtype``; None when all can."""
    smallest_normal = float(torch.finfo(dtype).smallest_normal)
    for name, value in scalars(node):
        if not fits_scalar(value, dtype):
            return f"its argument {name}={value!r} exceeds {dtype}"
        if 0.0 < abs(value) < smallest_normal and _is_factor(node, name):
            return f"its factor {name}={value!r} lies below the normal numbers of {dtype}"
        if op_name(node) == "logit" and float(torch.tensor(1.0 - value, dtype=torch.float64).to(dtype)) == 1.0:
            return f"its bound 1 - {value!r} is 1 in {dtype}"
    return None
