"""Inputs by name and of several sizes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

pytest.importorskip("executorch.exir")

from bitwright.errors import BitwrightWarning
from bitwright.export.conversion import ConversionError
from bitwright.export.executorch import export_executorch, run_executorch
from bitwright.export.executorch.exporter import _captured
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.matrix import each_value
from tests.measures import sqnr


class Gated(nn.Module):
    """Tensors by position and by name, and a flag."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 8)

    def forward(self, x, gate, *, shift, scaled=True):
        x = torch.relu(self.first(x)) * torch.sigmoid(gate)
        return self.last(x * 2 if scaled else x) + shift


class Cut(nn.Module):
    """Queries, keys and values by one layer, which is cut in different ways."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.layer, self.last = cut, nn.Linear(32, 48), nn.Linear(16, 8)

    def forward(self, x):
        query, key, value = self.cut(self.layer(x))
        return self.last(query * torch.sigmoid(key) + value)


CUTS = {
    "split": lambda x: x.split(16, dim=-1),
    "split by sizes": lambda x: x.split([16, 16, 16], -1),
    "chunk": lambda x: x.chunk(3, dim=-1),
    "tensor_split": lambda x: x.tensor_split(3, dim=1),
    "unbind": lambda x: x.unflatten(-1, (3, 16)).unbind(1),
}


class Convolving(nn.Module):
    """PyTorch takes another way for 16 images and more."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


def _prepared(model, config, args, kwargs=None):
    torch.manual_seed(0)
    quantizer = Quantizer(model.eval(), config)
    ready = quantizer.prepare(args, example_kwargs=kwargs)
    with quantizer.calibration_mode(), torch.no_grad():
        ready(*args, **(kwargs or {}))
    return ready.eval()


@pytest.mark.parametrize(("names", "mode"), each_value([("gate", "shift"), ("shift", "gate")], ["eager", "graph"]))
def test_inputs_by_name_come_after_those_by_position(mode, names, tmp_path):
    """In the order in which they are given, flags among them."""
    x, tensors = torch.randn(4, 32), {"gate": torch.randn(4, 48), "shift": torch.randn(4, 8)}
    kwargs = {**{name: tensors[name] for name in names}, "scaled": False}
    ready = _prepared(Gated(), QuantizerConfig.presets.w8(execution_mode=mode), (x,), kwargs)
    path = export_executorch(ready, (x,), tmp_path / "m.pte", example_kwargs=kwargs)
    (found,) = run_executorch(path, (x, *kwargs.values()))
    assert sqnr(ready(x, **kwargs), found) > 90


@pytest.mark.parametrize("preset", ["w8", "w8a8"])
def test_batches_of_all_sizes_up_to_the_largest(preset, tmp_path):
    """Also of more than the 15 images that a convolution of the example's size takes."""
    x = torch.randn(2, 3, 8, 8)
    ready = _prepared(Convolving(), getattr(QuantizerConfig.presets, preset)(execution_mode="eager"), (x,))
    path = export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=({0: Dim("batch", max=40)},))
    for size in (1, 2, 7, 16, 40):
        images = torch.randn(size, 3, 8, 8)
        assert sqnr(ready(images), run_executorch(path, (images,))[0]) > (90 if preset == "w8" else 40)
    with pytest.raises(ConversionError, match="cannot run"):
        run_executorch(path, (torch.randn(41, 3, 8, 8),))


@pytest.mark.parametrize(
    ("preset", "layout", "largest"),
    [
        ("w8", torch.channels_last, 20),
        ("w8", torch.channels_last, None),
        ("w8", torch.contiguous_format, 20),
        ("w8a8", torch.channels_last, 20),
    ],
)
def test_images_with_channels_last(preset, layout, largest, tmp_path):
    """Of all sizes and in any layout, whatever the layout of the example."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=layout)
    ready = _prepared(Convolving(), getattr(QuantizerConfig.presets, preset)(execution_mode="eager"), (x,))
    sizes = None if largest is None else ({0: Dim("batch", max=largest)},)
    path = export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=sizes)
    for number in (2,) if largest is None else (1, 2, largest):
        images = torch.randn(number, 3, 8, 8)
        for given in (images, images.contiguous(memory_format=torch.channels_last)):
            assert sqnr(ready(given), run_executorch(path, (given,))[0]) > (90 if preset == "w8" else 45)


@pytest.mark.parametrize("size", [Dim.DYNAMIC, Dim("batch", min=2)])
def test_sizes_without_an_end_are_refused(size, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    ready = _prepared(Convolving(), QuantizerConfig.presets.w8(execution_mode="eager"), (x,))
    with pytest.raises(ValueError, match="dimension 0 of input 0 unbounded"):
        export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=({0: size},))
    assert not (tmp_path / "m.pte").exists()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("preset", [pytest.param("w8", marks=pytest.mark.slow), "w8a8"])
def test_batches_that_are_cut(cut, preset, tmp_path, caplog):
    """As GPT-2 does; ExecuTorch's verifier would fix the batch to the size of the examples."""
    x = torch.randn(4, 32)
    ready = _prepared(Cut(CUTS[cut]), getattr(QuantizerConfig.presets, preset)(execution_mode="eager"), (x,))
    path = export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=({0: Dim("batch", max=40)},))
    assert "did not work" not in caplog.text
    for size in (1, 17, 40):
        rows = torch.randn(size, 32)
        assert sqnr(ready(rows), run_executorch(path, (rows,))[0]) > (90 if preset == "w8" else 30)


def test_batches_of_recurrent_layers(tmp_path, caplog):
    """ExecuTorch makes them of pieces whose rows its verifier would count, and so fix the batch."""
    x = torch.randn(2, 3, 8)
    model = nn.GRU(8, 8, batch_first=True).eval()
    path = export_executorch(model, (x,), tmp_path / "m.pte", dynamic_shapes=({0: Dim("batch", max=9)},))
    assert "did not work" not in caplog.text
    for size in (1, 9):
        x = torch.randn(size, 3, 8)
        assert sqnr(model(x)[0], run_executorch(path, (x,))[0]) > 90


class Turned(nn.Module):
    """The last rows first, by a number of rows that only a run knows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x):
        return self.layer(torch.cat(x.split([x.shape[0] - 2, 2])[::-1]))


def test_pieces_of_sizes_that_only_a_run_knows(tmp_path):
    """ExecuTorch's verifier counts the rows of the first piece, and would fix them to the example's."""
    x = torch.randn(4, 32)
    ready = _prepared(Turned(), QuantizerConfig.presets.w8(execution_mode="eager"), (x,))
    shapes = ({0: Dim("batch", min=4, max=40)},)
    path = export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=shapes)
    for rows in (4, 5, 9, 40):
        x = torch.randn(rows, 32)
        assert sqnr(ready(x), run_executorch(path, (x,))[0]) > 90


def test_sizes_that_the_runtime_does_not_take_are_said(tmp_path, monkeypatch):
    """ExecuTorch says nothing of what it keeps to the example's size: the file would fail for the user."""

    def agree(path, program, inputs, enough_db):
        if inputs is not program.example_inputs:
            raise RuntimeError("sizes differ")
        return True

    monkeypatch.setattr("bitwright.export.executorch.runtime._outputs_agree", agree)
    x = torch.randn(4, 32)
    ready = _prepared(nn.Linear(32, 8), QuantizerConfig.presets.w8(execution_mode="eager"), (x,))
    with pytest.raises(ConversionError, match=r"sizes differ.*fewer dimensions"):
        export_executorch(ready, (x,), tmp_path / "m.pte", dynamic_shapes=({0: Dim("batch", min=2, max=40)},))
    assert not (tmp_path / "m.pte").exists()


class Branching(nn.Module):
    """A layer, and what depends on how many rows there are."""

    def __init__(self, rest):
        super().__init__()
        self.layer, self.rest = nn.Linear(8, 8), rest

    def forward(self, x):
        return self.rest(self.layer(x))


@pytest.mark.filterwarnings("ignore:The program holds for a narrower range")
def test_the_largest_size_in_another_branch():
    """Eight rows need no padding to fours: seven are the example, and the file is run on eight too."""

    def in_fours(y):
        missing = (4 - y.shape[0] % 4) % 4
        return (nn.functional.pad(y, (0, 0, 0, missing)) if missing > 0 else y).unflatten(0, (-1, 4)).mean(1)

    x = torch.randn(5, 8)
    program, others = _captured(Branching(in_fours), (x,), {}, ({0: Dim.DYNAMIC(min=2, max=8)},))
    assert [len(args[0]) for args, _ in (program.example_inputs, *others)] == [7, 5, 8]
    of_fifties = Branching(lambda y: y * 2 if y.shape[0] % 50 == 0 else y * 3)
    with pytest.raises(ConversionError, match="100 in the example, but not 99"):
        _captured(of_fifties, (x,), {}, ({0: Dim.DYNAMIC(min=2, max=100)},))


def test_a_narrower_range_is_told_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BitwrightWarning)
        model = Branching(lambda y: y * 2 if y.shape[0] > 3 else y * 3)
        _captured(model, (torch.randn(6, 8),), {}, ({0: Dim.DYNAMIC(min=2, max=16)},))
    assert len([one for one in caught if issubclass(one.category, BitwrightWarning)]) == 1


class Sequences(nn.Module):
    """Convolutions over time of what layers give with the channels last."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.wide = nn.Linear(8, 16), nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 8, 1)

    def forward(self, x):
        return self.wide(torch.relu(self.conv(torch.relu(self.first(x)).transpose(1, 2)))).transpose(1, 2)


@pytest.mark.parametrize("preset", ["w8", "w8a8"])
def test_convolutions_over_turned_inputs_take_all_sizes(preset, tmp_path):
    """ExecuTorch leaves them the sizes of the example, or all but the largest, unless they are copied in front."""
    torch.manual_seed(0)
    x = torch.randn(4, 12, 8)
    quantizer = Quantizer(Sequences().eval(), getattr(QuantizerConfig.presets, preset)(execution_mode="eager"))
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        ready(x)
    sizes = {0: Dim("batch", min=1, max=16), 1: Dim("time", min=2, max=32)}
    path = export_executorch(ready.eval(), (x,), tmp_path / "m.pte", dynamic_shapes=(sizes,))
    for batch, time in ((1, 2), (16, 32), (5, 7)):
        other = torch.randn(batch, time, 8)
        assert sqnr(ready(other), run_executorch(path, (other,))[0]) > (50 if preset == "w8a8" else 110)
