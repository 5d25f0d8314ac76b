"""Core AI models whose batch may vary."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

pytest.importorskip("coreai_torch")

from bitwright.errors import BitwrightError
from bitwright.export import complex_numbers
from bitwright.export.conversion import ConversionError, converting
from bitwright.export.coreai import export_coreai, run_coreai
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.measures import sqnr

BATCH = ({0: torch.export.Dim.DYNAMIC},)


class FoldedHeads(nn.Module):
    """Attention whose heads stand in the batch, multiplied as a batch of matrices."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (part.view(n, t, 4, 4).transpose(1, 2).reshape(n * 4, t, 4) for part in self.qkv(x).chunk(3, -1))
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(n, 4, t, 4)


class Einsum(nn.Module):
    """Attention as sums of products by index."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        y = self.project(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return torch.einsum("bhqk,bhsk->bhqs", y, y)


@pytest.mark.parametrize("kind", [FoldedHeads, Einsum])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_products_of_folded_batches_run(kind, mode, tmp_path):
    """Files with a dynamic batch run with other batches, and compute what the prepared model does."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    quantizer = Quantizer(kind().eval(), QuantizerConfig.presets.w4(execution_mode=mode))
    ready = quantizer.prepare((x,), **({"dynamic_shapes": BATCH} if mode == "graph" else {})).eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel", dynamic_shapes=BATCH)
    for batch in (1, 2, 3, 4):
        x = torch.randn(batch, 5, 16)
        with torch.no_grad():
            assert sqnr(ready(x), run_coreai(path, (x,))[0]) > 100


class HardAttention(nn.Module):
    """Scores of one for the largest, as the grouping of GroupViT has them, and a number added to some."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 6)

    def forward(self, x):
        scores = self.project(x)
        largest = scores.max(1, keepdim=True)[1]
        hard = torch.zeros_like(scores).scatter_(1, largest, 1.0)
        return hard * scores, scores.scatter(1, largest, 0.1, reduce="add")


def test_numbers_are_scattered(tmp_path):
    """coreai-torch ends the process where it broadcasts a number to a dynamic size."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    ready = Quantizer(HardAttention().eval(), QuantizerConfig.presets.w4(execution_mode="eager")).prepare((x,)).eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel", dynamic_shapes=BATCH)
    for batch in (1, 2, 3):
        x = torch.randn(batch, 5, 16)
        with torch.no_grad():
            expected = ready(x)
        assert min(sqnr(*pair) for pair in zip(expected, run_coreai(path, (x,)), strict=True)) > 100


class Relative(nn.Module):
    """Scores of the embeddings in the middle of a table, of which a tensor says how many."""

    def __init__(self):
        super().__init__()
        self.project, self.table = nn.Linear(16, 16), nn.Embedding(16, 16)

    def forward(self, x):
        length = torch.tensor(min(x.shape[1], 8))
        near = self.table.weight[8 - length : 8 + length].unsqueeze(0)
        return torch.matmul(self.project(x), near.transpose(-1, -2))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_only_assertions_read_is_left_out(mode, tmp_path):
    """As the places in memory of slices whose length a tensor says, which DeBERTa takes."""
    torch.manual_seed(0)
    x, shapes = torch.randn(2, 5, 16), ({0: torch.export.Dim("b", max=4), 1: torch.export.Dim("s", min=2, max=8)},)
    quantizer = Quantizer(Relative().eval(), QuantizerConfig.presets.w8(execution_mode=mode))
    ready = quantizer.prepare((x,), **({"dynamic_shapes": shapes} if mode == "graph" else {})).eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel", dynamic_shapes=shapes)
    x = torch.randn(3, 7, 16)
    with torch.no_grad():
        assert sqnr(ready(x), run_coreai(path, (x,))[0]) > 100


def test_the_runtimes_words_are_not_taken_for_a_finalized_model(monkeypatch, tmp_path):
    """Names of the runtime's kernels do not mean that the model was finalized."""

    def refuse(coroutine):
        coroutine.close()
        raise RuntimeError('KernelError(kernelName: "coreai.batch_matmul")')

    monkeypatch.setattr("asyncio.run", refuse)
    with pytest.raises(BitwrightError, match=r"coreai\.batch_matmul.*write the float model with other operators"):
        run_coreai(tmp_path, ())


@pytest.mark.parametrize(("converter", "finalized"), [("coreai-torch", False), ("torch.export", True)])
def test_core_ais_words_are_not_taken_for_a_finalized_model(converter, finalized):
    with pytest.raises(ConversionError) as caught, converting(converter):
        raise RuntimeError("'coreai.reduce_max' op failed to verify its axes")
    assert ("finalized for Core AI" in str(caught.value)) == finalized


def _check(kind, preset, mode, shapes, sizes, tmp_path):
    """The file computes what the prepared model does, on inputs of several sizes, first those of the example."""
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(sizes[0])
    quantizer = Quantizer(model, getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    ready = quantizer.prepare((x,), **({"dynamic_shapes": shapes} if mode == "graph" else {}))
    with quantizer.calibration_mode(), torch.no_grad():
        ready(x)
    ready.eval()
    path = export_coreai(ready, (x,), tmp_path / "m.aimodel", dynamic_shapes=shapes)
    for size in sizes:
        x = torch.randn(size)
        with torch.no_grad():
            expected = tree_leaves(ready(x))
        for one, other in zip(expected, run_coreai(path, (x,)), strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            assert sqnr(one, other) > 100


class Positions(nn.Module):
    """Adds the last rows of a table, and neighbours: the larger of two sizes, and parts of one row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(64, 4))

    def forward(self, x):
        y = self.layer(x) + self.table[max(0, 64 - x.shape[1]) :]
        return (y + nn.functional.pad(y[:, 1:], (0, 0, 0, 1))) * torch.ones(max(x.shape[1] - 3, 2)).sum()


class Embedded(nn.Module):
    """Rows of tables as position embeddings are written: the dimensions in front of them are added by views."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.register_buffer("table", torch.randn(64, 4))

    def forward(self, x):
        n = x.shape[1]
        heads = self.layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
        rotated = heads * self.table[None, -n:].reshape(1, 1, n, 4).sin()
        behind = self.table[torch.arange(n)].view(1, n, 1, 4)
        means = x.mean(-1, keepdim=True) - self.table[:n].view(1, n, 4)
        return rotated + self.table[:n].view(1, 1, n, 4), means, behind.expand(x.shape[0], n, 2, 4)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_views_add_dimensions_that_another_operand_fills(mode, tmp_path):
    """The optimizer moved the views behind the sums and products, where sizes did not fit."""
    shapes = ({0: torch.export.Dim("b", max=4), 1: torch.export.Dim("s", max=32)},)
    _check(Embedded, "w8", mode, shapes, [(2, 8, 4), (1, 3, 4), (3, 32, 4)], tmp_path)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_sizes_are_computed_from_sizes(mode, tmp_path):
    shapes = ({1: torch.export.Dim("s", max=32)},)
    _check(Positions, "w8", mode, shapes, [(2, 8, 4), (2, 2, 4), (2, 5, 4), (2, 32, 4)], tmp_path)


class InWindows(nn.Module):
    """Rows in windows: padded to whole ones, in front, behind or to a given length; pools that round up."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        missing = -y.shape[2] % 4
        whole = nn.functional.pad(y, (1, 2, 0, missing), value=2.0).unflatten(2, (-1, 4)).mean(3)
        around = nn.functional.pad(y, (0, 0, missing, 9 - y.shape[2]), value=-0.5)
        averages = nn.functional.avg_pool2d(y, 2, ceil_mode=True, divisor_override=3)
        of_values = nn.functional.avg_pool2d(y, 2, 3, 1, ceil_mode=True, count_include_pad=False)
        return whole, around, averages, of_values, nn.functional.max_pool2d(y, 2, 3, ceil_mode=True)


def test_windows_of_free_sizes(tmp_path):
    """The last window stands out, is full, or begins behind the values."""
    shapes = ({2: torch.export.Dim.DYNAMIC(min=4, max=16)},)
    _check(InWindows, "w8", "graph", shapes, [(1, 2, size, 6) for size in (7, 8, 9, 11)], tmp_path)


class RotatedWhole(nn.Module):
    """What rotates all columns, as Phi-3 does, and puts behind them the rest: none."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        y = self.project(x)
        behind = torch.cat([y.sin(), y[..., 16:]], -1).reshape(-1, 4, 4)
        around = torch.cat([y[..., :0], y.cos(), y.new_zeros(*y.shape[:2], 0)], -1).flatten(0, 1)
        return behind, around, torch.cat([(y * 9).int(), y[..., :0]], -1)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nothing_behind_a_tensor(mode, tmp_path):
    """The runtime takes a tensor without elements, of dynamic sizes, for one with some, or ends the process."""
    _check(RotatedWhole, "w8a8", mode, BATCH, [(2, 5, 16), (1, 5, 16), (3, 5, 16)], tmp_path)


def test_graphs_with_nothing_quantized_take_other_sizes(tmp_path):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.randn(4, 16)
    shapes = ({0: torch.export.Dim("rows", min=1, max=16)},)
    ready = Quantizer(model, QuantizerConfig(global_config=None)).prepare((x,), dynamic_shapes=shapes).eval()
    path = export_coreai(ready, (x,), tmp_path / "model.aimodel", dynamic_shapes=shapes)
    more = torch.randn(7, 16)
    with torch.no_grad():
        assert sqnr(ready(more), run_coreai(path, (more,))[0]) > 100


class Spectrogram(nn.Module):
    """A spectrogram whose last frames are quieter, and the signals of it."""

    def __init__(self, **how):
        super().__init__()
        self.how = {"hop_length": 8, "window": torch.hann_window(how.get("win_length") or 32), **how}

    def forward(self, x):
        z = torch.stft(x, 32, **self.how, return_complex=True)
        z = torch.cat([z[..., :6], z[..., 6:] * 0.1], -1)
        how = {key: value for key, value in self.how.items() if key not in ("center", "pad_mode")}
        signals = torch.istft(z, 32, **how, center=True) if self.how.get("center", True) else x
        return z.abs(), signals


SPECTROGRAMS = {
    "torch's defaults": {},
    "as they lie": {"center": False},
    "a shorter window, both halves": {
        "win_length": 20, "normalized": True, "onesided": False, "pad_mode": "constant",
    },
}  # fmt: skip


@pytest.mark.parametrize("how", SPECTROGRAMS.values(), ids=SPECTROGRAMS)
def test_spectrograms_run_at_every_batch(how, tmp_path):
    """PyTorch's kernels of ``stft`` and ``istft`` ask for sizes as numbers, which fixes them to the example's."""
    torch.manual_seed(0)
    model = Spectrogram(**how).eval()
    path = export_coreai(model, (torch.randn(2, 100),), tmp_path / "m.aimodel", dynamic_shapes=BATCH)
    for batch in (1, 2, 5):
        x = torch.randn(batch, 100)
        for expected, found in zip(model(x), run_coreai(path, (x,)), strict=True):
            assert found.shape == expected.shape
            assert sqnr(expected, found) > 90


def test_sizes_that_a_decomposition_fixes_are_refused(monkeypatch, tmp_path):
    """A file that holds for the example's batch alone is not written; the error says which size, and what fixed it."""
    monkeypatch.setattr(complex_numbers, "SHORT_TIME", {})
    with pytest.raises(ConversionError, match=r"aten\.stft.*: dimension 0 of the input 'x' \(2 in the file\)"):
        export_coreai(
            Spectrogram(center=False).eval(), (torch.randn(2, 100),), tmp_path / "m.aimodel", dynamic_shapes=BATCH
        )
    assert not (tmp_path / "m.aimodel").exists()
