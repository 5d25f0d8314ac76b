"""Decompositions in less time: the same operators are found, the same programs made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._export import utils
from torch.export import decomp_utils, exported_program

from bitwright.export.decomposing import decomposed, quick_decompositions

LOOKS = (utils, exported_program, decomp_utils)


def _functions():
    listing = utils._materialize_cpp_cia_ops
    return [module._collect_all_valid_cia_ops for module in LOOKS], listing, torch._ops.Callable


@pytest.fixture
def listings(monkeypatch):
    """One entry for each time that all operators are listed."""
    entries, listed = [], utils._materialize_cpp_cia_ops

    def counted():
        entries.append(None)
        listed()

    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", counted)
    return entries


def test_the_same_operators_are_found(listings):
    expected = utils._collect_all_valid_cia_ops()
    assert len(listings) > 10
    listings.clear()
    with quick_decompositions(), quick_decompositions():
        assert exported_program._collect_all_valid_cia_ops() == expected
    assert 1 <= len(listings) <= 2


def test_operators_registered_meanwhile_are_found():
    with quick_decompositions():
        before = exported_program._collect_all_valid_cia_ops()
        library = torch.library.Library("bitwright_listed", "DEF")
        try:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
            assert torch.ops.bitwright_listed.twice.default in exported_program._collect_all_valid_cia_ops() - before
        finally:
            library._destroy()


def test_torchs_functions_are_left_as_they_were():
    before = _functions()
    with quick_decompositions():
        assert _functions() != before
    with pytest.raises(RuntimeError, match="stop"), quick_decompositions():
        raise RuntimeError("stop")
    assert _functions() == before


@pytest.mark.parametrize("table", [None, {}])
def test_programs_are_the_same(table, listings):
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).eval()
    program = torch.export.export(model, (torch.randn(2, 3),))
    expected = program.run_decompositions(table)
    often = len(listings)
    listings.clear()
    found = decomposed(program, table)
    assert 0 < len(listings) < often / 10
    assert found.graph_module.code == expected.graph_module.code
    assert ("linear" in found.graph_module.code) is (table is not None)


def test_symbols_that_a_converter_left_lying_are_forgotten():
    """As torch.onnx does, which asks for values while it fails."""

    class Checked(nn.Module):
        def forward(self, x):
            torch._check_tensor_all(x > -9, lambda: "too small")
            return x + x.sum().item()

    program = torch.export.export(Checked(), (torch.ones(3),))
    shape_env = next(iter(program.graph.nodes)).meta["val"].fake_mode.shape_env
    shape_env.create_unbacked_symint()
    assert torch.equal(decomposed(program).module()(torch.ones(3)), torch.full((3,), 4.0))
