"""Complex numbers of exported programs as pairs of real ones, as rotary embeddings multiply by them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from .constants import add_constant, compute_beforehand, remove_constant
from .decomposing import decomposed
from .graph_edits import argument, call, replace
from .lacking import composed
from .short_time import SHORT_TIME

__all__ = ["calls_on_complex_numbers", "complex_nodes", "without_complex_numbers"]

Pair: TypeAlias = tuple[Any, Any]
"""Real and imaginary part: nodes or numbers. The second is None where it is zero."""

_aten = torch.ops.aten
_OF_EACH_PART = frozenset((
    "alias", "cat", "chunk", "clone", "constant_pad_nd", "contiguous", "copy", "cumsum", "detach", "diagonal", "expand",
    "fill", "flatten", "flip", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select",
    "masked_fill", "mean", "movedim", "narrow", "neg", "pad", "permute", "reflection_pad1d", "reflection_pad2d",
    "repeat", "repeat_interleave", "replication_pad1d", "replication_pad2d", "reshape", "roll", "scatter",
    "scatter_add", "select", "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes", "squeeze",
    "stack", "sum", "t", "tile", "transpose", "tril", "triu", "unbind", "unflatten", "unfold", "unsafe_split",
    "unsqueeze", "view", "where", "_unsafe_view", "_reshape_alias",
))  # fmt: skip
"""Operators that do with complex numbers what they do with each part."""
_VALUES = frozenset(("self", "other", "tensors", "src", "source", "value", "values"))
"""Arguments of these operators of which each part gets its own; the others are places, sizes and conditions."""
_FILLED = (
    "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "zeros", "zeros_like",
)  # fmt: skip
_HIGHEST_POWER = 16
_NORMALIZATIONS = {0: 0.0, 1: -0.5, 2: -1.0}
"""Powers of the number of elements that PyTorch's transforms multiply by: not at all, by its root, by itself."""
_LONGEST_TRANSFORM = 2048
"""Elements whose matrix of waves a file may hold: 32 MiB for both parts."""


class _NoPairsError(Exception):
    """There is no form of a call with pairs."""


def complex_nodes(program: ExportedProgram) -> list[fx.Node]:
    """Return the nodes of a program that are complex, inputs among them."""
    return [node for node in program.graph.nodes if node.op != "output" and _is_complex(node)]


def without_complex_numbers(program: ExportedProgram) -> ExportedProgram | None:
    """Return a program with pairs of real numbers for its complex ones.

    Fourier transforms are products with matrices, of sizes that are known and at most 2048.

    Args:
        program: may be changed, but not in what it computes.

    Returns:
        None where there are no complex numbers; where the program reads or returns some; or where an operator on them
        has no form with pairs.
    """
    if not complex_nodes(program):
        return None
    program = _in_primitives(program)
    compute_beforehand(program, _is_complex)
    before = set(program.graph.find_nodes(op="placeholder"))
    try:
        results = _Pairs(program).results()
    except _NoPairsError:
        program.graph.eliminate_dead_code()
        for node in [node for node in program.graph.find_nodes(op="placeholder") if node not in before]:
            remove_constant(program, node)
        return None
    for node, result in results.items():
        replace(node, result)
    program.graph.eliminate_dead_code()
    for node in [node for node in program.graph.find_nodes(op="placeholder") if _is_complex(node)]:
        remove_constant(program, node)
    program.graph_module.recompile()
    return program


def _in_primitives(program: ExportedProgram) -> ExportedProgram:
    """A program without operators on complex numbers that write, or that PyTorch makes of others: ``torch.stft``."""
    if any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in calls_on_complex_numbers(program)
    ):
        program = decomposed(program, {})
    known: set[Any] = set()
    while made := {node.target for node in calls_on_complex_numbers(program) if _is_made(node.target)} - known:
        known |= made
        program = decomposed(program, {op: SHORT_TIME.get(op) or composed(op) for op in made})
    return program


def calls_on_complex_numbers(program: ExportedProgram) -> list[fx.Node]:
    """Return the complex nodes of a program, and the nodes that read them."""
    return [user for node in complex_nodes(program) for user in (node, *node.users)]


def _is_made(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    known = op.overloadpacket.__name__ in _OF_EACH_PART
    return not known and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    if isinstance(value, list | tuple):
        return any(isinstance(one, torch.Tensor) and one.is_complex() for one in value)
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


class _Pairs:
    """The pairs of a program's complex nodes, whose forms are inserted beside them.

    Args:
        program: whose graph gets the forms.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._graph = program.graph
        self._pairs: dict[fx.Node, Any] = {}
        self._matrices: dict[Any, fx.Node] = {}
        multiply, add, subtract = (partial(call, self._graph, op.Tensor) for op in (_aten.mul, _aten.add, _aten.sub))
        self._multiply, self._add, self._subtract = multiply, add, subtract
        self._forms: dict[str, Callable[[fx.Node], Any]] = {
            "_fft_c2c": self._transform,
            "_fft_c2r": self._transform_to_real,
            "_fft_r2c": self._transform_of_real,
            "_conj": self._conjugate,
            "_conj_physical": self._conjugate,
            "conj": self._conjugate,
            "conj_physical": self._conjugate,
            "_to_copy": self._cast,
            "abs": self._length,
            "add": partial(self._sum, combine=add),
            "angle": self._angle,
            "complex": lambda node: (node.args[0], node.args[1]),
            "div": self._quotient,
            "exp": self._power_of_e,
            "imag": lambda node: call(self._graph, _aten.alias.default, self._both(node.args[0])[1]),
            "mul": lambda node: self._product(self._pair(node.args[0]), self._pair(node.args[1])),
            "log": lambda node: (call(self._graph, _aten.log.default, self._length(node)), self._angle(node)),
            **dict.fromkeys(("bmm", "dot", "mm", "mv"), self._product_of_matrices),
            "addmm": partial(self._added_product, product=_aten.mm.default),
            "baddbmm": partial(self._added_product, product=_aten.bmm.default),
            **dict.fromkeys(_FILLED, self._filled),
            "polar": lambda node: self._on_circle(node.args[0], node.args[1]),
            "pow": self._power,
            "real": lambda node: call(self._graph, _aten.alias.default, self._both(node.args[0])[0]),
            "reciprocal": lambda node: self._divided((1.0, None), self._pair(node.args[0])),
            "resolve_conj": lambda node: self._pair(node.args[0]),
            "resolve_neg": lambda node: self._pair(node.args[0]),
            "rsub": lambda node: self._sum(node, combine=lambda one, other: subtract(other, one)),
            "sub": partial(self._sum, combine=subtract),
            "to": self._cast,
            "view_as_complex": lambda node: tuple(self._select(node.args[0], part) for part in (0, 1)),
            "view_as_real": lambda node: call(self._graph, _aten.stack.default, list(self._both(node.args[0])), -1),
            "sqrt": self._root,
        }

    def results(self) -> dict[fx.Node, fx.Node]:
        """Return what takes the place of calls that make real numbers of complex ones.

        Raises:
            _NoPairsError: a call has no form.
        """
        results = {}
        for node in list(self._graph.nodes):
            reads = any(map(_is_complex, node.all_input_nodes))
            if node.op == "placeholder" and _is_complex(node):
                self._pairs[node] = self._state(node)
            elif node.op == "output" and reads:
                raise _NoPairsError
            elif node.target is _aten._assert_tensor_metadata.default:
                if reads:
                    self._graph.erase_node(node)
            elif reads or _is_complex(node):
                with self._graph.inserting_before(node):
                    form = self._form(node)
                if isinstance(form, fx.Node):
                    results[node] = form
                else:
                    self._pairs[node] = form
        return results

    def _form(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            pieces, number = node.args
            return tuple(piece[number] for piece in self._pairs[pieces])  # type: ignore[index]
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
            raise _NoPairsError
        name = target.overloadpacket.__name__
        if name in self._forms:
            return self._forms[name](node)
        if name not in _OF_EACH_PART:
            raise _NoPairsError
        return self._of_parts(node)

    def _of_parts(self, node: fx.Node) -> Pair:
        if not _is_complex(node) or node.kwargs.get("reduce", "add") != "add":
            raise _NoPairsError  # real, or products, which are not those of the parts
        return tuple(self._of_part(node, part) for part in (0, 1))

    def _of_part(self, node: fx.Node, part: int) -> Any:
        args, kwargs = self._arguments_of_part(node, part)
        made = call(self._graph, node.target, *args, **kwargs)
        if _is_complex(made):
            raise _NoPairsError  # for a dtype among the arguments
        if isinstance(made.meta["val"], torch.Tensor):
            return made
        return [self._piece(made, number) for number in range(len(made.meta["val"]))]

    def _arguments_of_part(self, node: fx.Node, part: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call with one part of each value among them."""
        target: Any = node.target
        dtype = _first_dtype(node).to_real()

        def of_value(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [of_value(one) for one in value]
            if isinstance(value, int | float | complex):
                return complex(value).real if part == 0 else complex(value).imag
            if not isinstance(value, fx.Node):
                return value
            if value in self._pairs:
                return self._pairs[value][part]
            real = call(self._graph, _aten._to_copy.default, value, dtype=dtype)
            return real if part == 0 else call(self._graph, _aten.zeros_like.default, real)

        names = [argument.name for argument in target._schema.arguments]
        args = [of_value(arg) if name in _VALUES else arg for name, arg in zip(names, node.args, strict=False)]
        kwargs = {name: of_value(arg) if name in _VALUES else arg for name, arg in node.kwargs.items()}
        if any(map(_is_complex, tree_leaves((args, kwargs)))):
            raise _NoPairsError  # one that is no value: a factor
        return args, kwargs

    def _filled(self, node: fx.Node) -> Pair:
        target: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._pair(source)[0])
        val = torch.empty_like(node.meta["val"], dtype=node.meta["val"].dtype.to_real())
        given: list[Any] = list(args)
        number = 0.0 + 0.0j
        names = [argument.name for argument in target._schema.arguments]
        if "fill_value" in names:
            place = names.index("fill_value")
            number = complex(given[place])
            given[place] = number.real
        real = self._graph.call_function(target, tuple(given), {**kwargs, "dtype": val.dtype})
        real.meta["val"] = val
        return real, call(self._graph, _aten.full_like.default, real, number.imag)

    def _piece(self, made: fx.Node, number: int) -> fx.Node:
        piece: fx.Node = self._graph.call_function(operator.getitem, (made, number))
        piece.meta["val"] = made.meta["val"][number]
        return piece

    def _state(self, node: fx.Node) -> Pair:
        targets = {spec.arg.name: spec.target for spec in self._program.graph_signature.input_specs}
        state = {**self._program.constants, **self._program.state_dict}.get(targets.get(node.name) or "")
        if state is None or node.name in self._program.graph_signature.user_inputs:
            raise _NoPairsError
        parts = torch.view_as_real(state.detach().resolve_conj()).unbind(-1)
        names = (f"{node.name}_{which}" for which in ("real", "imag"))
        return tuple(  # type: ignore[return-value]
            add_constant(self._program, node, name, part.contiguous()) for name, part in zip(names, parts, strict=True)
        )

    def _pair(self, value: Any) -> Pair:
        if isinstance(value, fx.Node):
            pair: Pair = self._pairs.get(value, (value, None))
            return pair
        return (value.real, value.imag) if isinstance(value, complex) else (value, None)

    def _both(self, value: Any) -> Pair:
        """The pair of a node, with zeros for an imaginary part that it has not."""
        real, imaginary = self._pair(value)
        if imaginary is None:
            imaginary = call(self._graph, _aten.zeros_like.default, real)
        return real, imaginary

    def _select(self, node: Any, part: int) -> fx.Node:
        return call(self._graph, _aten.select.int, node, -1, part)

    def _cast(self, node: fx.Node) -> Any:
        source, value = node.args[0], node.meta["val"]
        if value.dtype != torch.complex64:
            raise _NoPairsError  # to real numbers, which forgets a part with a warning, or to a type no file has
        real, imaginary = self._pair(source)
        parts = (real, imaginary) if imaginary is not None else self._both(source)
        return tuple(call(self._graph, _aten._to_copy.default, part, dtype=torch.float32) for part in parts)

    def _conjugate(self, node: fx.Node) -> Pair:
        real, imaginary = self._both(node.args[0])
        return real, call(self._graph, _aten.neg.default, imaginary)

    def _angle(self, node: fx.Node) -> fx.Node:
        real, imaginary = self._both(node.args[0])
        return call(self._graph, _aten.atan2.default, imaginary, real)

    def _root(self, node: fx.Node) -> Pair:
        length = call(self._graph, _aten.sqrt.default, self._length(node))
        return self._on_circle(length, self._multiply(self._angle(node), 0.5))

    def _length(self, node: fx.Node) -> fx.Node:
        return call(self._graph, _aten.sqrt.default, self._square(*self._both(node.args[0])))

    def _square(self, real: Any, imaginary: Any) -> fx.Node:
        return self._add(self._multiply(real, real), self._multiply(imaginary, imaginary))

    def _on_circle(self, length: Any, angle: Any) -> Pair:
        turned = (call(self._graph, op.default, angle) for op in (_aten.cos, _aten.sin))
        return tuple(self._multiply(part, length) for part in turned)  # type: ignore[return-value]

    def _power_of_e(self, node: fx.Node) -> Pair:
        real, imaginary = self._both(node.args[0])
        return self._on_circle(call(self._graph, _aten.exp.default, real), imaginary)

    def _sum(self, node: fx.Node, *, combine: Callable[[Any, Any], fx.Node]) -> Pair:
        if argument(node, "alpha") != 1:
            raise _NoPairsError
        one, other = (self._widened(value) for value in node.args[:2])
        return combine(one[0], other[0]), combine(one[1], other[1])

    def _widened(self, value: Any) -> Pair:
        """The parts of a summand; of real ones the second are zeros in the shape that the first has."""
        if isinstance(value, fx.Node):
            return self._both(value)
        real, imaginary = self._pair(value)
        return real, 0.0 if imaginary is None else imaginary

    def _product(self, one: Pair, other: Pair, times: Callable[[Any, Any], fx.Node] | None = None) -> Pair:
        times = times or self._times
        if one[1] is None:
            return times(one[0], other[0]), times(one[0], other[1])
        if other[1] is None:
            return times(one[0], other[0]), times(one[1], other[0])
        real = self._subtract(times(one[0], other[0]), times(one[1], other[1]))
        return real, self._add(times(one[0], other[1]), times(one[1], other[0]))

    def _times(self, one: Any, other: Any) -> fx.Node:
        return self._multiply(one, other) if isinstance(one, fx.Node) else self._multiply(other, one)

    def _quotient(self, node: fx.Node) -> Pair:
        if len(node.args) != 2 or node.kwargs:
            raise _NoPairsError
        return self._divided(*map(self._pair, node.args))

    def _power(self, node: fx.Node) -> Pair:
        exponent: Any = node.args[1]
        if exponent not in range(1, _HIGHEST_POWER + 1):
            raise _NoPairsError
        factor = power = self._pair(node.args[0])
        for _ in range(int(exponent) - 1):
            power = self._product(power, factor)
        return power

    def _product_of_matrices(self, node: fx.Node) -> Pair:
        target: Any = node.target
        one, other = map(self._pair, node.args)
        return self._product(one, other, partial(call, self._graph, target))

    def _added_product(self, node: fx.Node, *, product: Any) -> Pair:
        if argument(node, "alpha") != 1 or argument(node, "beta") != 1:
            raise _NoPairsError
        one, other = map(self._pair, node.args[1:3])
        parts = self._product(one, other, partial(call, self._graph, product))
        return tuple(map(self._add, parts, self._both(node.args[0])))  # type: ignore[return-value]

    def _divided(self, dividend: Pair, divisor: Pair) -> Pair:
        divide = partial(call, self._graph, _aten.div.Tensor)
        if divisor[1] is None:
            return divide(dividend[0], divisor[0]), divide(dividend[1], divisor[0])
        if not isinstance(divisor[0], fx.Node):
            inverse = 1 / complex(*divisor)
            return self._product(dividend, (inverse.real, inverse.imag))
        square = self._square(*divisor)
        product = self._product(dividend, (divisor[0], call(self._graph, _aten.neg.default, divisor[1])))
        return divide(product[0], square), divide(product[1], square)

    def _transform_of_real(self, node: fx.Node) -> Pair:
        args: Any = node.args
        x, dims, normalization, onesided = args
        *others, last = dims
        size = self._size(x, last)
        frequencies = size // 2 + 1 if onesided else size
        real, sines = (self._along(x, last, waves, size, frequencies) for waves in (_cosines, _sines))
        pair = self._along_all((real, call(self._graph, _aten.neg.default, sines)), others, forward=True)
        return self._scaled(pair, self._scale(x, dims, normalization))

    def _transform(self, node: fx.Node) -> Pair:
        args: Any = node.args
        z, dims, normalization, forward = args
        scale = self._scale(z, dims, normalization)
        return self._scaled(self._along_all(self._both(z), dims, forward=bool(forward)), scale)

    def _transform_to_real(self, node: fx.Node) -> fx.Node:
        args: Any = node.args
        z, dims, normalization, size = args
        *others, last = dims
        if not _has_matrix(size):
            raise _NoPairsError
        parts = self._along_all(self._both(z), others, forward=False)
        sums = (
            self._along(part, last, waves, size, size // 2 + 1)
            for part, waves in zip(parts, (_cosines_back, _sines_back), strict=True)
        )
        elements = size * math.prod(self._size(z, dim) for dim in others)
        return self._multiply(self._subtract(*sums), elements ** _NORMALIZATIONS[normalization])

    def _along_all(self, pair: Pair, dims: Any, *, forward: bool) -> Pair:
        for dim in dims:
            size = self._size(pair[0], dim)
            combined = [self._along(part, dim, waves, size, size) for part in pair for waves in (_cosines, _sines)]
            real_cosines, real_sines, imaginary_cosines, imaginary_sines = combined
            first, second = (self._add, self._subtract) if forward else (self._subtract, self._add)
            pair = first(real_cosines, imaginary_sines), second(imaginary_cosines, real_sines)
        return pair

    def _size(self, x: Any, dim: int) -> int:
        size: Any = x.meta["val"].shape[dim]
        if not _has_matrix(size):
            raise _NoPairsError
        return int(size)

    def _scale(self, x: Any, dims: Any, normalization: Any) -> float:
        return float(math.prod(self._size(x, dim) for dim in dims) ** _NORMALIZATIONS[normalization])

    def _scaled(self, pair: Pair, scale: float) -> Pair:
        return pair if scale == 1 else (self._multiply(pair[0], scale), self._multiply(pair[1], scale))

    def _along(self, x: Any, dim: int, waves: Callable[[int, int], torch.Tensor], size: int, frequencies: int) -> Any:
        """Multiply the vectors that lie along a dimension with a matrix, of which there is one for all that need it."""
        dtype = x.meta["val"].dtype
        key = waves, size, frequencies, dtype
        if key not in self._matrices:
            place, matrix = next(iter(self._graph.nodes)), waves(size, frequencies).to(dtype).contiguous()
            self._matrices[key] = add_constant(self._program, place, "waves", matrix)
        moved = call(self._graph, _aten.transpose.int, x, dim, -1)
        product = call(self._graph, _aten.matmul.default, moved, self._matrices[key])
        return call(self._graph, _aten.transpose.int, product, dim, -1)


def _has_matrix(size: Any) -> bool:
    return isinstance(size, int) and size <= _LONGEST_TRANSFORM


def _angles(size: int, frequencies: int) -> torch.Tensor:
    """Angles of waves in float64, a column for each frequency."""
    steps = torch.outer(torch.arange(size), torch.arange(frequencies)) % size
    return steps.double() * (2 * math.pi / size)


def _cosines(size: int, frequencies: int) -> torch.Tensor:
    return _angles(size, frequencies).cos()


def _sines(size: int, frequencies: int) -> torch.Tensor:
    return _angles(size, frequencies).sin()


def _cosines_back(size: int, frequencies: int) -> torch.Tensor:
    return _times(size, frequencies) * _cosines(size, frequencies).t()


def _sines_back(size: int, frequencies: int) -> torch.Tensor:
    return _times(size, frequencies) * _sines(size, frequencies).t()


def _times(size: int, frequencies: int) -> torch.Tensor:
    """How often each frequency of real numbers counts: most stand for their conjugate, too."""
    times = torch.full((frequencies, 1), 2.0, dtype=torch.float64)
    times[0] = 1
    if size % 2 == 0:
        times[-1] = 1
    return times


def _first_dtype(node: fx.Node) -> torch.dtype:
    value: Any = node.meta["val"]
    tensor: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor.dtype
