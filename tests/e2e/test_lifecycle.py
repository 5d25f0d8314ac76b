"""The whole life of prepared graphs of real models: batches of other sizes, copies, pickles, compilation, export."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from bitwright.quantization import Quantizer, QuantizerConfig

from .architectures import Architecture, build

pytest.importorskip("transformers")

NAMES = ("bert", "llama", "resnet")


def outputs(model: Any, architecture: Architecture, batch: int = 2) -> list[torch.Tensor]:
    """Results for the example inputs, repeated to ``batch``."""

    def sized(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * (1 + batch // len(x)))[:batch]

    kwargs = {name: sized(value) for name, value in architecture.kwargs.items()}
    result = model(*map(sized, architecture.args), **kwargs)
    leaves = tree_leaves(list(result.values()) if isinstance(result, dict) else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def prepared(architecture: Architecture, dynamic: bool = False) -> tuple[Quantizer, Any]:
    """A calibrated graph."""
    names = list(inspect.signature(architecture.model.forward).parameters)
    shapes = {name: {0: Dim.AUTO} for name in (*names[: len(architecture.args)], *architecture.kwargs)}
    quantizer = Quantizer(architecture.model, QuantizerConfig())
    model = quantizer.prepare(
        architecture.args, dynamic_shapes=shapes if dynamic else None, example_kwargs=architecture.kwargs
    )
    with quantizer.calibration_mode(), torch.no_grad():
        outputs(model, architecture)
    return quantizer, model


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_dynamic_batch_lives_to_the_end(name: str) -> None:
    """Prepare with two, train with three, finalize, run with five, export the result again and run with seven."""
    architecture = build(name)
    quantizer, model = prepared(architecture, dynamic=True)
    with torch.no_grad():
        expected = outputs(architecture.model, architecture, 3)[0]
        assert torch.allclose(outputs(model, architecture, 3)[0], expected, atol=0.2 * float(expected.abs().max()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with quantizer.training_mode():
        outputs(model, architecture, 3)[0].square().mean().backward()
        optimizer.step()
    model.eval()
    final = quantizer.finalize(backend="_torch")
    with torch.no_grad():
        assert torch.equal(outputs(final, architecture, 5)[0], outputs(model, architecture, 5)[0])
        names = list(inspect.signature(architecture.model.forward).parameters)[: len(architecture.args)]
        given = dict(zip(names, architecture.args, strict=True)) | architecture.kwargs
        again = torch.export.export(
            final, architecture.args, architecture.kwargs, dynamic_shapes={key: {0: Dim.AUTO} for key in given}
        )
        assert torch.equal(outputs(again.module(), architecture, 7)[0], outputs(final, architecture, 7)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    """Before and after finalization; a state_dict carries one model's ranges to another."""
    architecture = build(name)
    quantizer, model = prepared(architecture)
    with torch.no_grad():
        for graph in (model, quantizer.finalize(backend="_torch")):
            expected = outputs(graph, architecture)[0]
            assert torch.equal(outputs(copy.deepcopy(graph), architecture)[0], expected)
            assert torch.equal(outputs(pickle.loads(pickle.dumps(graph)), architecture)[0], expected)
        other = build(name)
        _, fresh = prepared(other)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(outputs(fresh, architecture)[0], outputs(model, architecture)[0])


@pytest.mark.parametrize("name", ["bert"])
def test_compiled_without_a_break(name: str) -> None:
    """The prepared graph is one graph for the compiler too."""
    architecture = build(name)
    _, model = prepared(architecture)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(outputs(compiled, architecture)[0], outputs(model, architecture)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert"])
def test_a_model_that_was_exported_before(name: str) -> None:
    """The module of an ExportedProgram is taken like any other, and gives the same numbers."""
    architecture = build(name)
    with torch.no_grad():
        exported = torch.export.export(architecture.model, architecture.args, architecture.kwargs).module()
    _, expected = prepared(architecture)
    quantizer = Quantizer(exported, QuantizerConfig())
    model = quantizer.prepare(architecture.args, example_kwargs=architecture.kwargs)
    with quantizer.calibration_mode(), torch.no_grad():
        outputs(model, architecture)
    with torch.no_grad():
        assert torch.equal(outputs(model, architecture)[0], outputs(expected, architecture)[0])
