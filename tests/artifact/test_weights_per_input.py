"""Packed weights with a row for each input: products as GPT-2 writes them, from the codes or decoded in parts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bitwright.artifact.lazy import MANY_VECTORS, LazyWeight
from bitwright.kernels.packed import PackedMatrix
from tests.artifact.weight_per_input import TILED, row_per_input
from tests.measures import sqnr

pytest.importorskip("numba")


@torch.no_grad()
@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_weights_with_a_row_for_each_input(name, bias, fast, monkeypatch):
    """Multiplied with codes of 4 bits, or decoded in parts, down to one vector; sums are added in another order."""
    torch.manual_seed(0)
    prepared, packed = row_per_input(TILED[name], bias)
    monkeypatch.setattr(PackedMatrix, "multiplies_columns", lambda self: fast and self.bits == 4)
    monkeypatch.setattr(LazyWeight, "decoded", lambda self: pytest.fail("decoded at once"))
    for x in (torch.randn(1, 1000), torch.randn(2, 17, 1000), torch.randn(1000, MANY_VECTORS).t()):
        assert sqnr(prepared(x), packed(x)) > 110


@torch.no_grad()
def test_all_ways_to_write_a_product(monkeypatch):
    """Functions, methods, operators, vectors in several dimensions: none decodes the weight at once."""
    prepared, packed = row_per_input(TILED["blocks"])
    dense, packed = prepared.weight.detach(), packed.weight
    x, bias = torch.randn(2, 3, 1000), torch.randn(256)
    calls = (
        lambda w: x @ w,
        lambda w: x[0].mm(w),
        lambda w: torch.matmul(x[:, :1], w),
        lambda w: x.transpose(0, 1).matmul(w),
        lambda w: x[0, 0] @ w,
        lambda w: bias.addmm(x[1], w),
        lambda w: torch.ops.aten.addmm.default(bias, x[1], w),
        lambda w: torch.ops.aten.matmul.default(x, w),
    )
    expected = [call(dense) for call in calls]
    monkeypatch.setattr(LazyWeight, "decoded", lambda self: pytest.fail("decoded at once"))
    for call, wanted in zip(calls, expected, strict=True):
        found = call(packed)
        assert found.shape == wanted.shape
        assert sqnr(wanted, found) > 110


@torch.no_grad()
def test_arguments_by_name():
    """Whatever torch calls them."""
    prepared, packed = row_per_input(TILED["blocks"])
    dense, packed = prepared.weight.detach(), packed.weight
    x, y, ids = torch.randn(9, 1000), torch.randn(9, 256), torch.tensor([3, 999])
    for call in (
        lambda w: torch.addmm(input=y[0], mat1=x, mat2=w),
        lambda w: torch.mm(x, mat2=w),
        lambda w: torch.matmul(input=x, other=w),
        lambda w: F.linear(input=y, weight=w),
        lambda w: F.embedding(input=ids, weight=w),
    ):
        assert sqnr(call(dense), call(packed)) > 110


@torch.no_grad()
def test_vectors_without_numbers():
    """Shapes are torch's, and so are refusals."""
    _, packed = row_per_input(TILED["blocks"])
    assert (torch.randn(0, 1000) @ packed.weight).shape == (0, 256)
    for x in (torch.randn(2, 999), torch.randn(2, 3, 0)):
        with pytest.raises(RuntimeError, match="shape"):
            x @ packed.weight


@torch.no_grad()
def test_products_that_mean_more_are_computed_with_the_decoded_weight():
    """Factors, results in memory that is there, matrices of biases, few digits and derivatives."""
    prepared, packed = row_per_input(TILED["blocks"])
    dense, packed = prepared.weight.detach(), packed.weight
    x, matrix = torch.randn(3, 1000), torch.randn(3, 256)
    for call in (
        lambda w: torch.addmm(matrix, x, w),
        lambda w: torch.addmm(matrix[0], x, w, beta=2, alpha=3),
        lambda w: torch.mm(x, w, out=torch.empty(3, 256)),
        lambda w: x @ w.double().float(),
        lambda w: torch.baddbmm(matrix[None], x[None], w[None]),
        lambda w: torch.mm(x.bfloat16(), w.bfloat16()),
    ):
        assert torch.equal(call(dense), call(packed))
    with torch.enable_grad():
        wanted = x.clone().requires_grad_()
        torch.mm(wanted, packed).sum().backward()
    assert torch.equal(wanted.grad, (torch.ones(3, 256) @ dense.t()))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:This overload of addmm:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_vectors_that_are_no_plain_memory_take_the_decoded_weight():
    """Sparse, nested and negated vectors, function transforms, and the order of arguments that torch used to have."""
    prepared, packed = row_per_input(TILED["blocks"])
    dense, packed = prepared.weight.detach(), packed.weight
    x, y, bias = torch.randn(3, 1000), torch.randn(3, 256), torch.randn(256)
    for call in (
        lambda w: x.to_sparse() @ w,
        lambda w: torch.mm(x.to_sparse_csr(), w),
        lambda w: F.linear(torch.nested.nested_tensor([y[:1], y[1:]]), w)[1],
        lambda w: torch._neg_view(x[:1]) @ w,
        lambda w: torch.func.vmap(lambda row: row @ w)(x),
        lambda w: torch.func.grad(lambda rows: (rows @ w).sum())(x),
        lambda w: torch.func.jvp(lambda rows: rows @ w, (x,), (x,))[1],
        lambda w: torch.addmm(2, bias, 3, x, w),
        lambda w: bias.addmm(2, 3, x, w),
    ):
        assert torch.equal(call(dense), call(packed))


def test_biases_that_want_gradients_keep_the_codes(monkeypatch):
    """A bias is added to the result, where autograd sees it; a layer called outside ``no_grad`` is as fast."""
    prepared, packed = row_per_input(TILED["blocks"], bias=True)
    x = torch.randn(9, 1000)
    expected = prepared(x)
    monkeypatch.setattr(PackedMatrix, "multiplies_columns", lambda self: True)
    monkeypatch.setattr(LazyWeight, "decoded", lambda self: pytest.fail("decoded at once"))
    packed.bias.requires_grad_()
    found = packed(x)
    found.sum().backward()
    assert torch.equal(packed.bias.grad, torch.full((256,), 9.0))
    assert sqnr(expected.detach(), found.detach()) > 110


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_exact(dtype):
    """Parts of sums would be rounded to few digits; the weight is decoded instead."""
    prepared, packed = row_per_input(TILED["blocks"], bias=True)
    packed = packed.to(dtype)
    dense, x = packed.weight.clone(), torch.randn(9, 1000).to(dtype)
    assert type(packed.weight) is LazyWeight
    assert sqnr(prepared.weight, dense.float()) > 40
    assert torch.equal(packed(x), torch.addmm(packed.bias, x, dense))


@torch.no_grad()
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("count", [1, 9])
def test_what_is_not_finite_stays_in_its_vector(value, count):
    """Every output of that vector is not finite, and those of others are what they were."""
    _, packed = row_per_input(TILED["columns"])
    x = torch.randn(count + 1, 1000)
    clean = (x @ packed.weight)[:count]
    x[count, 3] = value
    found = x @ packed.weight
    assert torch.equal(found[:count], clean)
    assert not found[count].isfinite().any()


@torch.no_grad()
def test_compiled_and_exported_products_see_plain_operations():
    """A trace holds the decoding on packed buffers, none of the kernels."""
    prepared, packed = row_per_input(TILED["columns"], bias=True)
    x = torch.randn(9, 1000)
    expected = prepared(x)
    program = torch.export.export(packed, (x,))
    assert {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")} <= {"aten"}
    assert torch.equal(program.module()(x), expected)
    assert sqnr(expected, torch.compile(packed, backend="aot_eager", fullgraph=True)(x)) > 110
