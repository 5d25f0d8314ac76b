"""Dynamic shapes of models that take any number of inputs, and of the graphs that were captured from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import fx, nn

from bitwright.program.exporting import exported
from bitwright.program.input_shapes import InputShapesError, shapes_by_input
from bitwright.quantization import Quantizer, QuantizerConfig

FREE = torch.export.Dim.DYNAMIC


def graph_of(*names: str) -> fx.GraphModule:
    """A graph with inputs of some names."""
    graph = fx.Graph()
    graph.output([graph.placeholder(name) for name in names])
    return fx.GraphModule({}, graph)


class TestShapesByInput:
    """Dynamic shapes of a graph: as its model had them, or as it has them itself."""

    x = torch.ones(3, 4)

    @pytest.mark.parametrize(
        ("args", "given", "expected"),
        [
            ((x, x, x), ({0: 1}, ({1: 2}, None)), ({0: 1}, {1: 2}, None)),
            ((x, x, x), ({0: 1}, {1: 2}, None), ({0: 1}, {1: 2}, None)),
            ((x,), (({0: 1},),), ({0: 1},)),
            ((x,), ((None, 4),), ((None, 4),)),
            ((x[0],), ((None,),), ((None,),)),
            (((x,),), (({0: 1},),), (({0: 1},),)),
            ((x,), ({0: 1}, ()), ({0: 1},)),
            ((x,), None, None),
        ],
    )
    def test_in_order(self, args: tuple[Any, ...], given: Any, expected: Any) -> None:
        assert shapes_by_input(fx.GraphModule({}, fx.Graph()), args, None, given) == expected
        assert shapes_by_input(nn.Identity(), args, None, given) == given

    def test_by_name(self) -> None:
        model = graph_of("first", "rest_0", "rest_1", "pair")
        given = {"first": {0: 1}, "rest": (None, {0: 1}), "pair": ({1: 2}, None)}
        expected = {"first": {0: 1}, "rest_0": None, "rest_1": {0: 1}, "pair": ({1: 2}, None)}
        assert shapes_by_input(model, (self.x,) * 4, None, given) == expected
        assert shapes_by_input(model, (self.x,) * 4, None, expected) == expected


class Sums(nn.Module):
    """Adds up each input, which may be many, by itself."""

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, flag: bool = False, **others: torch.Tensor) -> Any:
        if "pair" in others:
            others |= others.pop("pair")
        return [t.sum() + flag for t in (x, *rest, *others.values())]


class Beside(nn.Module):
    """Has a positional input whose name its keyword inputs may have too."""

    def forward(self, x: torch.Tensor, /, **others: torch.Tensor) -> torch.Tensor:
        return x + others["x"]


def free_axes(program: torch.export.ExportedProgram) -> dict[str, list[int]]:
    """The dimensions of each input whose size is not fixed."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    return {
        name: [axis for axis, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def tensors(names: Iterable[str], size: int = 3) -> dict[str, torch.Tensor]:
    return {name: torch.randn(size, size) for name in names}


class TestKeywords:
    """Inputs of ``**others``, which torch.export takes shapes of in no form."""

    @pytest.mark.parametrize("names", [("mask", "bias"), ("bias", "mask")], ids=["as given", "other order"])
    @pytest.mark.parametrize("captured_once", [False, True], ids=["model", "graph"])
    @pytest.mark.parametrize("form", ["nested", "by name", "in order", "in order, each"])
    def test_each_input_has_the_shape_that_is_given_for_it(self, form, captured_once, names):
        """Whatever the form, and in whichever order the inputs are given."""
        others = {"mask": {0: FREE}, "bias": {1: FREE}}
        shapes: Any = {
            "nested": {"x": None, "rest": ({0: FREE, 1: FREE},), "others": others},
            "by name": {"x": None, "rest": ({0: FREE, 1: FREE},), **others},
            "in order": (None, ({0: FREE, 1: FREE},), others),
            "in order, each": (None, ({0: FREE, 1: FREE},), *(others[name] for name in names)),
        }[form]
        args, kwargs = tuple(tensors("xy").values()), tensors(names)
        model: Any = Sums()
        if captured_once:
            model = exported(model, args, kwargs, dynamic_shapes=shapes).module()
        program = exported(model, args, kwargs, dynamic_shapes=shapes)
        assert free_axes(program) == {"x": [], "rest_0": [0, 1], "mask": [0], "bias": [1]}
        longer = {"mask": torch.randn(7, 3), "bias": torch.randn(3, 8)}
        called = {name: longer[name] for name in names}
        assert program.module()(*args, **called) == Sums()(*args, **called)

    def test_inputs_that_are_named_as_the_parameter_or_hold_several(self):
        args, kwargs = tuple(tensors("x").values()), {**tensors(["others"]), "pair": tensors("ab")}
        pair = {"a": {0: FREE}, "b": {1: FREE}}
        expected = {"x": [0], "others": [1], "pair_a": [0], "pair_b": [1]}
        for others in ({"others": {"others": {1: FREE}, "pair": pair}}, {"others": {1: FREE}, "pair": pair}):
            shapes: Any = {"x": {0: FREE}, **others}
            program = exported(Sums(), args, kwargs, dynamic_shapes=shapes)
            again = exported(program.module(), args, kwargs, dynamic_shapes=shapes)
            assert free_axes(program) == free_axes(again) == expected

    def test_without_any_the_model_needs_no_shapes_for_them(self):
        args = tuple(tensors("x").values())
        for others in ({}, {"others": {}}):
            assert free_axes(exported(Sums(), args, {}, dynamic_shapes={"x": {0: FREE}, **others})) == {"x": [0]}

    def test_collections_of_torch(self):
        """They hold shapes by tensor, or by another call."""
        args, kwargs = tuple(tensors("x").values()), tensors(["mask"])
        by_tensor = torch.export.ShapesCollection()
        by_tensor[kwargs["mask"]] = {0: FREE}
        by_call = torch.export.AdditionalInputs()
        by_call.add(args, {"mask": torch.randn(5, 3)})
        for shapes in (by_tensor, by_call):
            program = exported(Sums(), args, kwargs, dynamic_shapes=shapes)
            again = exported(program.module(), args, kwargs, dynamic_shapes=shapes)
            assert free_axes(program) == free_axes(again) == {"x": [], "mask": [0]}

    @pytest.mark.parametrize(
        ("shapes", "words"),
        [
            ({"x": None, "others": {"masc": None}}, "for x, others.masc, and the inputs are x, mask. .* 'mask': ..."),
            ({"x": None}, "for x, and the inputs are x, mask"),
            ({"x": None, "mask": None, "others": None}, "for x, mask, others, and"),
            ((None,), "they are 1, and the inputs are x, mask"),
            ((None, None, None), "they are 3, and"),
        ],
    )
    def test_shapes_of_no_input_are_refused(self, shapes, words):
        args, kwargs = tuple(tensors("x").values()), tensors(["mask"])
        for model in (Sums(), graph_of("x", "mask")):
            with pytest.raises(InputShapesError, match=words):
                exported(model, args, kwargs, dynamic_shapes=shapes)

    def test_shapes_in_order_are_refused_where_the_graph_does_not_know_the_order(self):
        """Its inputs are in the order of the call that it was captured from, those of the model in its own."""
        kwargs = {**tensors(["first", "second"]), "mask": torch.ones(2)}
        graph = graph_of("x", "first", "second", "mask")
        with pytest.raises(InputShapesError, match="Give them by name"):
            shapes_by_input(graph, (torch.ones(3),), kwargs, (None, {0: FREE}, None, {"mask": None}))

    @pytest.mark.parametrize(
        ("name", "words"), [("x", "positional input has that name"), ("a b", "no parameter can have that name")]
    )
    def test_names_that_no_parameter_can_have_are_refused(self, name, words):
        with pytest.raises(InputShapesError, match=rf"'{name}' of Beside goes into \*\*others, and .*{words}"):
            exported(Beside(), (torch.ones(3),), {name: torch.ones(3)}, dynamic_shapes=({0: FREE}, {name: None}))

    def test_the_model_has_its_own_forward_again(self):
        """Also where the capture or the shapes are refused, which prepare passes on as it is."""
        args, kwargs, model = tuple(tensors("x").values()), tensors(["mask"]), Sums()
        shapes = {"x": {0: FREE}, "others": {"mask": {0: FREE}}}
        exported(model, args, kwargs, dynamic_shapes=shapes)
        with pytest.raises(RuntimeError, match="Unexpected input tensor shape"):
            exported(model, args, kwargs, dynamic_shapes={**shapes, "x": "batch"})
        quantizer = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="graph"))
        with pytest.raises(InputShapesError, match="the inputs are x, mask"):
            quantizer.prepare(args, example_kwargs=kwargs, dynamic_shapes={"x": None})
        assert "forward" not in vars(model)
