"""Weights that palettizer and pruner cannot take are refused by name, or left as they are; nothing is half done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright._weight_compressor import WeightCompressor
from bitwright.errors import BitwrightWarning, ConfigMatchWarning, PlanError
from bitwright.palettization import KMeansPalettizer
from bitwright.pruning import MagnitudePruner

COMPRESSORS = [KMeansPalettizer, MagnitudePruner]
EXAMPLE = (torch.randn(2, 32, generator=torch.Generator().manual_seed(0)),)

pytestmark = pytest.mark.parametrize("compressor", COMPRESSORS)


class Holder(nn.Module):
    """A weight of any kind behind a linear function."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point() or weight.is_complex())
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.linear(x.to(self.weight.dtype), self.weight).abs().to(x.dtype))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


def refused(compressor: type[WeightCompressor], model: nn.Module, error: type[Exception], match: str) -> None:
    """``prepare`` raises, and the model has no parametrization."""
    with pytest.raises(error, match=match):
        compressor(model).prepare(EXAMPLE)
    assert not any(hasattr(module, "parametrizations") for module in model.modules())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_entries_that_are_not_finite(compressor, value):
    """All broken weights come in one error."""
    model = two_layers()
    model[0].weight.data[3, 5] = value
    model[2].weight.data[0, 0] = value
    refused(compressor, model, PlanError, r"(?s)0\.weight.*NaN or infinite.*2\.weight")


def test_weights_without_data(compressor):
    """Weights on ``meta`` can be planned for, not compressed."""
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)).to("meta")
    example = (torch.zeros(2, 32, device="meta"),)
    assert len(compressor(model).plan(example).placements) == 2
    with pytest.raises(ValueError, match=r"meta device.*'0\.weight', '1\.weight'.*load_state_dict"):
        compressor(model).prepare(example)
    assert not any(hasattr(module, "parametrizations") for module in model.modules())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_layouts(compressor):
    """The layout is named, and what to do."""
    refused(compressor, Holder(torch.eye(32).to_sparse_csr()), PlanError, r"weight.*sparse_csr.*to_dense")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.complex64])
def test_numbers_that_are_not_real(compressor, dtype):
    """Integer and complex weights stay as they are, the others are compressed."""
    weight = (4 * torch.randn((32, 32), generator=torch.Generator().manual_seed(0))).to(dtype)
    model = Holder(weight.clone())
    if dtype == torch.int8:
        model.forward = lambda x: model.last(x @ model.weight.to(x.dtype).t())
    elif dtype == torch.int32:
        model.forward = lambda x: model.last((x.int() @ model.weight.t()).to(x.dtype))
    compressor(model).prepare(EXAMPLE)
    assert torch.equal(model.weight, weight)
    assert hasattr(model.last, "parametrizations")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes(compressor, dtype):
    """They keep their dtype, and are compressed as in float32."""
    model = two_layers().to(dtype)
    reference = copy.deepcopy(model).float()
    compressor(model).prepare((EXAMPLE[0].to(dtype),))
    compressor(reference).prepare(EXAMPLE)
    for index in (0, 2):
        weight, expected = model[index].weight, reference[index].weight
        assert weight.dtype == dtype
        torch.testing.assert_close(weight.float(), expected, rtol=0.01, atol=1e-3)


def test_arguments_that_finalize_does_not_have(compressor):
    """A misspelt keyword is an error, not a finalize for another backend."""
    model = two_layers()
    own = compressor(model)
    own.prepare(EXAMPLE)
    with pytest.raises(TypeError, match="backned"):
        own.finalize(backned="coreml")
    with pytest.raises(TypeError, match="positional"):
        own.finalize(model, "_torch", "folder")
    assert hasattr(model[0], "parametrizations")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules(compressor):
    """The remedy is the module that was scripted."""
    with pytest.raises(TypeError, match="TorchScript module"):
        compressor(torch.jit.script(two_layers()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_parts(compressor):
    """They are named where their weights are asked for, and called as they are where they are left out."""
    model = two_layers()
    model[0] = torch.jit.script(nn.Sequential(model[0], nn.ReLU()))
    refused(compressor, model, PlanError, r"torchscript\] 0: .*scripted or traced from.*set_module_name\('0', None\)")
    config = compressor(model)._config.set_module_name("0", None)
    prepared = compressor(model, config).prepare(EXAMPLE)
    assert hasattr(prepared[2], "parametrizations")
    assert prepared(*EXAMPLE).isfinite().all()


def test_weights_without_entries(compressor):
    """A layer of no inputs is left alone; the others are compressed."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.some = nn.Linear(0, 4), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.some(x) + self.none(x[:, :0])

    with pytest.warns(UserWarning, match="zero-element"):
        model = Empty()
    compressor(model).prepare(EXAMPLE)
    assert hasattr(model.some, "parametrizations")
    assert model(*EXAMPLE).isfinite().all()


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_weights(compressor, value):
    """A warning names the weight; the model still runs."""
    model = two_layers()
    model[0].weight.data.fill_(value)
    with pytest.warns(BitwrightWarning, match=r"constant-weight.*0\.weight"):
        compressor(model).prepare(EXAMPLE)
    assert model(*EXAMPLE).isfinite().all()


def test_computed_weights(compressor):
    """A weight that a parametrization computes is no parameter of the layer: it stays, the others are compressed.

    Spectral norms compute with buffers too.
    """
    for parametrization in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        _check_computed(compressor, parametrization)


def _check_computed(compressor, parametrization):
    model = two_layers()
    parametrization(model[0])
    model.eval()
    before = model[0].weight.detach().clone()
    with pytest.warns(ConfigMatchWarning, match=r"computed-weight\] 0\.linear"):
        compressor(model).prepare(EXAMPLE)
    assert torch.equal(model[0].weight, before)
    assert hasattr(model[2], "parametrizations")


def test_tied_weights(compressor):
    """One simulator for both names, in an embedding and in the head."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    model = Tied()
    compressor(model).prepare((torch.randint(0, 40, (2, 5)),))
    simulators = {id(module.parametrizations.weight[0]) for module in (model.embed, model.head)}
    assert len(simulators) == 1
    assert torch.equal(model.embed.weight, model.head.weight)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_weights(compressor, kind):
    """Both directions and layers are compressed, and the outputs are finite."""
    model = kind(32, 8, num_layers=2, bidirectional=True)
    compressor(model).prepare((torch.randn(3, 2, 32),))
    names = set(model.parametrizations)
    assert names == {
        f"weight_{end}_l{layer}{way}" for end in ("ih", "hh") for layer in (0, 1) for way in ("", "_reverse")
    }
    assert model(torch.randn(3, 2, 32))[0].isfinite().all()


def test_a_model_without_weights_to_compress_is_a_named_warning(compressor):
    """Neither norms nor matrices that a plain product reads are reached by default; the warning says how they are."""
    torch.manual_seed(0)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.table = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.table

    model, example = Product(), (torch.randn(8, 8),)
    graph = torch.export.export(model, example).module()
    for subject in (model, graph, nn.ReLU()):
        plan = compressor(subject).plan(example)
        assert [problem.code for problem in plan.problems] == ["nothing-to-compress"]
        with pytest.raises(PlanError, match="module_state_spec"):
            compressor(subject).prepare(example, strict=True)
        with pytest.warns(ConfigMatchWarning, match=f"nothing-to-compress.*{compressor._technique.kind.value}"):
            compressor(subject).prepare(example)
    off = compressor._config_type(global_config=None)
    assert compressor(nn.ReLU(), off).plan(example).problems == []


def test_weights_of_other_ops_have_a_row(compressor):
    """The plan says of every matrix what becomes of it, so that none stays dense in silence; its sum counts them."""
    torch.manual_seed(0)

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(32, 8)
            self.last = nn.Linear(8, 4)
            self.unread = nn.Parameter(torch.randn(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.cell(x))

    plan = compressor(Cell()).plan(EXAMPLE)
    notes = {row.tensor: row.note for row in plan if row.spec is None}
    assert notes["cell.weight_ih"] == notes["cell.weight_hh"]
    assert notes["cell.weight_ih"].startswith("read by gru_cell: left alone unless a module_state_spec names it")
    assert notes["unread"] == "no call of the model reads it with these inputs"
    assert plan.dense_bytes == 4 * (24 * 32 + 24 * 8 + 4 * 8 + 2 * 2)

    config = compressor._config_type()
    spec = config.global_config.op_state_spec["weight"]
    config.set_module_name("cell", type(config.global_config)(module_state_spec={"weight_ih": spec}))
    model = Cell()
    named = compressor(model, config)
    assert [row.tensor for row in named.plan(EXAMPLE) if row.spec] == ["cell.weight_ih", "last.weight"]
    before = model.cell.weight_ih.detach().clone()
    assert not torch.equal(named.prepare(EXAMPLE).cell.weight_ih, before)
