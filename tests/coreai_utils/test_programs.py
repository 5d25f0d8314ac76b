"""Compressed programs on the Core AI runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.coreai_utils import (
    CompressionGranularity,
    DType,
    QScheme,
    palettize_weights,
    quantize_weights,
    sparsify_weights,
)
from bitwright.errors import ConfigMatchWarning

pytest.importorskip("coreai", reason="needs pip install bitwright[coreai]")

from tests.coreai_utils.runtime import asset_bytes, convert, coreai_export, run, sqnr

G = CompressionGranularity
OUT, IN = 32, 64


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """Output channels of very different size: a scale along the wrong axis, or a shared one, loses most of them."""
    torch.manual_seed(0)
    return torch.randn(OUT, IN) * torch.logspace(-3, 3, OUT)[:, None]


def _linear(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return a program that multiplies with ``weight``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return convert(coreai_export(layer.to(dtype), torch.eye(weight.shape[1], dtype=dtype)))


@pytest.fixture(scope="module")
def program(weight: torch.Tensor) -> Any:
    return _linear(weight)


def _decoded(program: Any, dtype: torch.dtype = torch.float32) -> np.ndarray[Any, Any]:
    """Return the weight that the runtime computes with: it multiplies the identity."""
    return run(program, torch.eye(IN, dtype=dtype))[0].astype(np.float64).T


def _step(blocks: np.ndarray[Any, Any], bits: int, qscheme: QScheme) -> np.ndarray[Any, Any]:
    if qscheme is QScheme.SYMMETRIC:
        return 2 * np.abs(blocks).max(-1) / (2**bits - 2)
    return (blocks.max(-1).clip(0) - blocks.min(-1).clip(None, 0)) / (2**bits - 1)


@pytest.mark.parametrize("granularity", [G.PER_TENSOR, G.PER_CHANNEL, G.PER_BLOCK])
@pytest.mark.parametrize(
    ("dtype", "bits", "qscheme"),
    [
        (DType.INT8, 8, QScheme.SYMMETRIC),
        (DType.UINT8, 8, QScheme.ASYMMETRIC),
        (DType.INT4, 4, QScheme.ASYMMETRIC),
        (DType.UINT4, 4, QScheme.SYMMETRIC),
        (DType.INT2, 2, QScheme.SYMMETRIC),
        (DType.UINT2, 2, QScheme.ASYMMETRIC),
    ],
)
def test_integers_are_decoded_within_half_a_step(
    program: Any, weight: torch.Tensor, dtype: DType, bits: int, qscheme: QScheme, granularity: G
) -> None:
    """The step of every block follows from the weight alone."""
    exact = weight.double().numpy()
    blocks = {
        G.PER_TENSOR: exact.reshape(1, 1, -1),
        G.PER_CHANNEL: exact.reshape(OUT, 1, IN),
        G.PER_BLOCK: exact.reshape(OUT, 2, 32),
    }[granularity]
    decoded = _decoded(quantize_weights(program, dtype, qscheme, granularity))
    step = _step(blocks, bits, qscheme)[..., None]
    error = np.abs(decoded.reshape(blocks.shape) - blocks)
    limit = 0.5 if qscheme is QScheme.SYMMETRIC else 1.0
    assert (error <= limit * step * (1 + 1e-4)).all()
    codes = decoded.reshape(blocks.shape) / step
    assert np.abs(codes - codes.round()).max() < 1e-3


@pytest.mark.parametrize("granularity", [G.PER_TENSOR, G.PER_CHANNEL, G.PER_BLOCK])
@pytest.mark.parametrize(("dtype", "relative"), [(DType.FP8_E4M3FN, 2.0**-4), (DType.FP8_E5M2, 2.0**-3)])
def test_float8_is_decoded_within_its_precision(
    program: Any, weight: torch.Tensor, dtype: DType, relative: float, granularity: G
) -> None:
    decoded = _decoded(quantize_weights(program, dtype, granularity=granularity))
    exact = weight.double().numpy()
    smallest = np.abs(exact).max() * (2.0**-6 / 448 if dtype is DType.FP8_E4M3FN else 2.0**-14 / 57344)
    normal = np.abs(exact) > smallest
    assert np.abs(decoded / exact - 1)[normal].max() <= relative * 1.001


def _mx(exact: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """OCP Microscaling 1.0 in float64 (section 6.3, scale by the floor rule), blocks of 32 along the last axis."""
    exponent, torch_dtype = {
        DType.FP8_E4M3FN: (8, torch.float8_e4m3fn),
        DType.FP8_E5M2: (15, torch.float8_e5m2),
        DType.FP4_E2M1FN: (2, None),
    }[dtype]
    blocks = exact.reshape(exact.shape[0], -1, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - exponent)
    scaled = blocks / scale
    if torch_dtype is not None:
        largest = torch.finfo(torch_dtype).max
        elements = torch.from_numpy(scaled.clip(-largest, largest)).float().to(torch_dtype).double().numpy()
    else:
        # Ties go to the even code: of equally near values, the one that comes at an even place of the list.
        grid = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        distance = np.abs(np.abs(scaled)[..., None].clip(max=6.0) - grid) + np.arange(8) % 2 * 1e-12
        elements = np.sign(scaled) * grid[distance.argmin(-1)]
    return (elements * scale).reshape(exact.shape)


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3FN, DType.FP8_E5M2, DType.FP4_E2M1FN])
def test_microscaling_formats_are_exact(program: Any, weight: torch.Tensor, dtype: DType) -> None:
    scale_dtype = None if dtype is DType.FP4_E2M1FN else DType.FP8_E8M0FNU
    decoded = _decoded(quantize_weights(program, dtype, granularity=G.PER_BLOCK, scale_dtype=scale_dtype))
    np.testing.assert_array_equal(decoded, _mx(weight.double().numpy(), dtype))


class Readers(nn.Module):
    """One weight for each way to read it; output channels of very different size."""

    def __init__(self) -> None:
        super().__init__()
        size = torch.logspace(-2, 2, 40)
        self.linear = nn.Parameter(torch.randn(40, 32) * size[:, None])
        self.right = nn.Parameter(torch.randn(32, 40) * size)
        self.left = nn.Parameter(torch.randn(40, 32) * size[:, None])
        self.table = nn.Parameter(torch.randn(40, 32) * size[:, None])
        self.conv = nn.Parameter(torch.randn(40, 32, 3, 3) * size[:, None, None, None])
        self.up = nn.Parameter(torch.randn(32, 40, 2, 2) * size[:, None, None])

    def forward(self, x: torch.Tensor, image: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            nn.functional.linear(x, self.linear),
            x @ self.right,
            (self.left @ x.transpose(-1, -2)).transpose(-1, -2),
            nn.functional.embedding(i, self.table).transpose(-1, -2),
            nn.functional.conv2d(image, self.conv).movedim(1, -1),
            nn.functional.conv_transpose2d(image, self.up).movedim(1, -1),
        )


@pytest.fixture(scope="module")
def readers() -> tuple[Any, tuple[torch.Tensor, ...], list[np.ndarray[Any, Any]]]:
    torch.manual_seed(0)
    model = Readers()
    inputs = (torch.randn(2, 5, 32), torch.randn(1, 32, 5, 5), torch.arange(40, dtype=torch.int32))
    with torch.no_grad():
        reference = [result.double().numpy() for result in model(*inputs)]
    return convert(coreai_export(model, *inputs)), inputs, reference


@pytest.mark.parametrize(
    ("compress", "floor"),
    [
        (lambda p: quantize_weights(p, DType.INT8), 33),
        (lambda p: quantize_weights(p, DType.FP8_E4M3FN), 25),
        (lambda p: palettize_weights(p, n_bits=6, granularity=G.PER_CHANNEL), 25),
        (lambda p: palettize_weights(p, n_bits=6, enable_per_channel_scale=True), 25),
        (lambda p: palettize_weights(p, DType.INT8, n_bits=6, enable_per_channel_scale=True), 25),
        (lambda p: palettize_weights(p, DType.UINT8, n_bits=6, enable_per_channel_scale=True), 25),
    ],
)
def test_channels_are_found_for_every_reader(readers: Any, compress: Any, floor: float) -> None:
    """Every output channel is close, the smallest too: last axis of each result."""
    program, inputs, reference = readers
    for exact, result in zip(reference, run(compress(program), *inputs), strict=True):
        for channel in range(40):
            assert sqnr(exact[..., channel], result[..., channel]) > floor, (exact.shape, channel)


@pytest.mark.parametrize("n_bits", [1, 2, 3, 4, 6, 8])
def test_palettes_have_as_many_values_as_they_may(n_bits: int) -> None:
    """And are near the best: a normal weight loses about 6 dB a bit (Lloyd-Max: 4.4, 9.3, 14.6, 20.2, 32, 44 dB)."""
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    decoded = _decoded(palettize_weights(_linear(weight), n_bits=n_bits, enable_fast_kmeans_mode=False))
    assert len(np.unique(decoded)) == 2**n_bits
    assert sqnr(weight.numpy(), decoded) > {1: 4.0, 2: 9.0, 3: 14.3, 4: 20.0, 6: 32.0, 8: 45.0}[n_bits]


@pytest.mark.parametrize("lut_dtype", [None, DType.INT8, DType.UINT8, DType.FP8_E4M3FN, DType.FP8_E5M2])
@pytest.mark.parametrize("scaled", [False, True])
def test_tables_of_groups_quantized_and_scaled(lut_dtype: DType | None, scaled: bool) -> None:
    """Groups of 8 channels have their own tables, quantized with their own scale."""
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN) * torch.logspace(-2, 2, OUT // 8).repeat_interleave(8)[:, None]
    program = palettize_weights(
        _linear(weight), lut_dtype, 4, G.PER_GROUPED_CHANNEL, group_size=8, enable_per_channel_scale=scaled
    )
    decoded = _decoded(program)
    for start in range(0, OUT, 8):
        group = decoded[start : start + 8]
        if not scaled:
            assert len(np.unique(group)) <= 16
        assert sqnr(weight[start : start + 8].numpy(), group) > (17.5 if lut_dtype is DType.FP8_E5M2 else 19.0)


@pytest.mark.parametrize("lut_dtype", [None, DType.INT8])
def test_vectors_of_output_channels(lut_dtype: DType | None) -> None:
    """Two neighbouring channels share an index: at most 256 different pairs in each group."""
    torch.manual_seed(0)
    base = torch.randn(OUT // 2, IN)
    weight = torch.stack([base, base * 0.5 + torch.randn_like(base) * 0.05], 1).reshape(OUT, IN)
    program = palettize_weights(
        _linear(weight), lut_dtype, 8, G.PER_GROUPED_CHANNEL, group_size=8, cluster_dim=2, weight_num_threshold=100
    )
    decoded = _decoded(program)
    for start in range(0, OUT, 8):
        pairs = decoded[start : start + 8].reshape(4, 2, IN).transpose(0, 2, 1).reshape(-1, 2)
        assert len(np.unique(pairs, axis=0)) <= 256
    assert sqnr(weight.numpy(), decoded) > 25


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 1.0])
def test_pruned_weights_keep_the_rest_exactly(program: Any, weight: torch.Tensor, sparsity: float) -> None:
    decoded = _decoded(sparsify_weights(program, sparsity))
    exact = weight.double().numpy()
    zeros = decoded == 0
    assert zeros.sum() == int(exact.size * sparsity)
    np.testing.assert_array_equal(decoded[~zeros], exact[~zeros])
    if 0 < sparsity < 1:
        assert np.abs(exact[zeros]).max() <= np.abs(exact[~zeros]).min()


def test_n_of_m_and_blocks(program: Any, weight: torch.Tensor) -> None:
    decoded = _decoded(sparsify_weights(program, None, n_m_ratio=(2, 4)))
    assert ((decoded.reshape(OUT, -1, 4) == 0).sum(-1) == 2).all()
    decoded = _decoded(sparsify_weights(program, 0.5, block_size=4))
    assert np.isin((decoded.reshape(-1, 4, IN) == 0).sum(1), (0, 4)).all()


@pytest.mark.parametrize(
    ("how", "floor"),
    [
        ({"quantize_dtype": DType.INT8}, 40),
        ({"quantize_dtype": DType.UINT8}, 40),
        ({"quantize_dtype": DType.FP8_E4M3FN}, 28),
        ({"quantize_dtype": DType.FP8_E5M2}, 23),
        ({"palettize_nbits": 4}, 19),
        ({"palettize_nbits": 3}, 13),
    ],
)
def test_zeros_stay_zeros_between_quantized_values(how: dict[str, Any], floor: float) -> None:
    """A zero point does not leak into what was pruned."""
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    decoded = _decoded(sparsify_weights(_linear(weight), 0.5, **how))
    order = weight.abs().reshape(-1).argsort()
    pruned = np.zeros(weight.numel(), dtype=bool)
    pruned[order[: weight.numel() // 2].numpy()] = True
    flat = decoded.reshape(-1)
    assert (flat[pruned] == 0).all()
    assert sqnr(weight.reshape(-1).numpy()[~pruned], flat[~pruned]) > floor


@pytest.mark.parametrize(
    ("compress", "floor"),
    [
        (lambda p: quantize_weights(p, DType.INT8, QScheme.ASYMMETRIC), 40),
        (lambda p: quantize_weights(p, DType.INT4, granularity=G.PER_BLOCK), 18),
        (lambda p: quantize_weights(p, DType.FP8_E4M3FN), 28),
        (lambda p: quantize_weights(p, DType.FP4_E2M1FN, granularity=G.PER_BLOCK), 15),
        (lambda p: palettize_weights(p, DType.INT8, 6, enable_per_channel_scale=True), 28),
        (lambda p: sparsify_weights(p, 0.0, quantize_dtype=DType.UINT8), 36),
    ],
)
def test_half_precision_programs(compress: Any, floor: float) -> None:
    """Scales have the weight's own element type; the runtime takes no other."""
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    decoded = _decoded(compress(_linear(weight, torch.float16)), torch.float16)
    assert sqnr(weight.numpy(), decoded) > floor


def test_bfloat16_weights() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(IN, OUT).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.bfloat16()).float()

    model, x = Inner(), torch.randn(3, IN)
    program = quantize_weights(convert(coreai_export(model, x)), DType.INT8)
    assert "tensor<32x64xsi8>" in str(program)
    assert sqnr(model(x).detach().numpy(), run(program, x)[0]) > 38


class Product(nn.Module):
    """An einsum of the input with a weight."""

    def __init__(self, equation: str, weight: torch.Tensor) -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, x, self.weight)


@pytest.mark.parametrize(
    ("layer", "shape", "channel_axis"),
    [
        (lambda: nn.Conv1d(64, 32, 3), (4, 64, 8), 1),
        (lambda: nn.ConvTranspose1d(64, 32, 4, stride=2), (4, 64, 8), 1),
        (lambda: Product("bi,eio->beo", torch.randn(4, 64, 32) * torch.logspace(-3, 3, 4)[:, None, None]), (9, 64), 1),
        (lambda: Product("bthd,hdo->bto", torch.randn(4, 16, 32) * torch.logspace(-3, 3, 32)), (4, 9, 4, 16), 2),
    ],
    ids=["conv1d", "conv_transpose1d", "stack", "merged"],
)
def test_bfloat16_weights_that_reshapes_read(layer: Any, shape: tuple[int, ...], channel_axis: int) -> None:
    """The converter leaves reshapes of bfloat16 weights in the program; the channels are those behind them."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer().bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.bfloat16()).float()

    torch.manual_seed(0)
    model, x = Inner(), torch.randn(*shape)
    program = convert(coreai_export(model, x))
    exact = model(x).detach().numpy()
    for compress, floor in (
        (lambda p: quantize_weights(p, DType.INT8), 35),
        (lambda p: quantize_weights(p, DType.INT8, granularity=G.PER_BLOCK, block_size=16), 35),
        (lambda p: palettize_weights(p, n_bits=6, granularity=G.PER_CHANNEL), 32),
    ):
        compressed = compress(program)
        assert str(compressed) != str(program)
        result = run(compressed, x)[0]
        for channel in range(exact.shape[channel_axis]):
            assert sqnr(exact.take(channel, channel_axis), result.take(channel, channel_axis)) > floor


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_matrices_share_nothing(transposed: bool) -> None:
    """The weights of experts differ by orders of magnitude: each output channel of each is close."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(4, IN, OUT) * torch.logspace(-2, 2, 4)[:, None, None] * torch.logspace(-1, 1, OUT)
            self.weight = nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, self.weight.transpose(1, 2) if transposed else self.weight)

    torch.manual_seed(0)
    model, x = Experts(), torch.eye(IN).repeat(4, 1, 1)
    program = convert(coreai_export(model, x))
    exact = model(x).detach().numpy()
    for compress, floor in (
        (lambda p: quantize_weights(p, DType.INT8), 38),
        (lambda p: quantize_weights(p, DType.INT4, granularity=G.PER_BLOCK), 16),
        (lambda p: palettize_weights(p, n_bits=4, granularity=G.PER_CHANNEL), 19),
        (lambda p: palettize_weights(p, DType.INT8, 6, G.PER_GROUPED_CHANNEL, group_size=2), 22),
        (lambda p: palettize_weights(p, DType.UINT8, 6, enable_per_channel_scale=True), 28),
        (lambda p: palettize_weights(p, n_bits=6, granularity=G.PER_GROUPED_CHANNEL, group_size=2, cluster_dim=2), 13),
    ):
        result = run(compress(program), x)[0]
        for expert in range(4):
            for channel in range(OUT):
                assert sqnr(exact[expert, :, channel], result[expert, :, channel]) > floor


def test_constants_that_are_no_weights_are_named_with_their_readers(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)
            self.factor = nn.Parameter(torch.randn(60, IN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x * self.factor)

    x = torch.randn(60, IN)
    with pytest.warns(ConfigMatchWarning, match=r"Nothing was compressed.*\(60, 64\) read by .*mul"):
        quantize_weights(convert(coreai_export(Scaled(), x)), DType.INT8)
    with caplog.at_level("WARNING", "bitwright.coreai_utils"):
        quantize_weights(convert(coreai_export(Scaled(nn.Linear(IN, OUT)), x)), DType.INT8)
    assert "(60, 64) read by" in caplog.text


def test_what_is_left_alone(program: Any) -> None:
    """Small constants, biases, and what other operations read."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(IN, 2048)
            self.factor = nn.Parameter(torch.randn(3, 2048))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * self.factor

    text = str(quantize_weights(convert(coreai_export(Net(), torch.randn(3, IN))), DType.INT8))
    assert text.count("blockwise_shift_scale") == 1
    with pytest.warns(ConfigMatchWarning, match=f"Nothing was compressed.*more than {OUT * IN} elements"):
        assert "blockwise" not in str(quantize_weights(program, DType.INT8, weight_num_threshold=OUT * IN))
    assert "blockwise" in str(quantize_weights(program, DType.INT8, weight_num_threshold=OUT * IN - 1))


def test_copy_or_in_place(program: Any, weight: torch.Tensor) -> None:
    before = str(program)
    assert quantize_weights(program, DType.INT8) is not program
    assert str(program) == before
    own = _linear(weight)
    assert quantize_weights(own, DType.INT8, in_place=True) is own
    assert "blockwise_shift_scale" in str(own)
    with pytest.warns(ConfigMatchWarning, match="What an earlier pass compressed stays.*of sparsify_weights"):
        assert "blockwise_shift_scale" in str(palettize_weights(own, in_place=True))


def test_weights_that_do_not_divide_are_named_in_one_warning() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 40), nn.Linear(40, 72), nn.Linear(72, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)))

    program = convert(coreai_export(Net(), torch.randn(3, 64)))
    with pytest.warns(ConfigMatchWarning, match=r"2 of 3 weights.*\(72, 40\).*40 input channels.*\(32, 72\)") as caught:
        result = quantize_weights(program, DType.INT4, granularity=G.PER_BLOCK)
    assert len(caught) == 1
    assert str(result).count("blockwise_shift_scale") == 1
    with pytest.warns(ConfigMatchWarning, match="groups of 16"):
        palettize_weights(program, granularity=G.PER_GROUPED_CHANNEL, group_size=16)


def test_readers_that_disagree_about_the_channels_are_told() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight) @ self.weight.T

    model, x = Tied(), torch.randn(3, 48)
    program = convert(coreai_export(model, x))
    with pytest.warns(ConfigMatchWarning, match=r"different readers; axis 0 is taken"):
        result = quantize_weights(program, DType.INT8)
    assert sqnr(model(x).detach().numpy(), run(result, x)[0]) > 38


def test_weights_that_are_not_finite_are_left_alone() -> None:
    weight = torch.randn(OUT, IN)
    weight[0, :2] = float("nan")
    with pytest.warns(ConfigMatchWarning, match=r"1 of 1 weights.*holds 2 values that are NaN"):
        result = palettize_weights(_linear(weight))
    assert "lut_to_dense" not in str(result)


def test_loaded_programs_and_their_size(weight: torch.Tensor, tmp_path: Path) -> None:
    """A saved asset can be loaded, compressed and saved again, and takes the bits that it should."""
    from coreai.authoring import AIModelAsset

    torch.manual_seed(0)
    large = torch.randn(256, 256)
    _linear(large).save_asset(tmp_path / "dense.aimodel")
    program = AIModelAsset.load(tmp_path / "dense.aimodel").program
    dense = asset_bytes(program)
    for compressed, bits in (
        (quantize_weights(program, DType.INT8), 8 + 32 / 256 * 3),
        (quantize_weights(program, DType.INT4, granularity=G.PER_BLOCK), 4 + (32 + 4 + 32) / 32),
        (palettize_weights(program, n_bits=2), 2),
        (palettize_weights(program, n_bits=6), 6),
        (sparsify_weights(program, 0.75), 8 + 1),
        (sparsify_weights(program, 0.75, quantize_dtype=DType.INT8), 2 + 1),
    ):
        assert asset_bytes(compressed) - (dense - large.numel() * 4) < large.numel() * bits / 8 + 1500


@pytest.mark.parametrize("wrong", [None, "model.aimodel", nn.Linear(2, 2)])
def test_what_is_no_program_is_refused(wrong: object) -> None:
    for function in (lambda p: quantize_weights(p, DType.INT8), palettize_weights, sparsify_weights):
        with pytest.raises(TypeError, match=r"Expected a coreai\.authoring\.AIProgram.*TorchConverter"):
            function(wrong)


def test_after_casting_to_half() -> None:
    """The two program passes go together: cast, convert, compress."""
    from bitwright.casting import cast_to_16_bit_precision

    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 8)),
        torch.randn(1, 3, 8, 8),
    )
    exported = coreai_export(model, x)
    cast_to_16_bit_precision(exported)
    program = convert(exported)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigMatchWarning)
        result = quantize_weights(program, DType.INT8, weight_num_threshold=100)
    assert sqnr(model(x).detach().numpy(), run(result, x.half())[0]) > 34


@pytest.mark.parametrize("lut_dtype", [DType.INT8, DType.UINT8, DType.FP8_E4M3FN])
def test_codes_of_small_weights_are_chosen_with_the_scales_that_half_precision_holds(lut_dtype: DType) -> None:
    """Channel scales of 2**-15 or so leave a few bits of the scales of their tables."""
    torch.manual_seed(0)
    weight = (torch.randn(OUT, IN) * 2.5e-5).half().float()
    options: dict[str, Any] = {"lut_dtype": lut_dtype, "n_bits": 8, "granularity": G.PER_CHANNEL}
    floats = palettize_weights(_linear(weight), **options, enable_per_channel_scale=True)
    halves = palettize_weights(_linear(weight, torch.float16), **options, enable_per_channel_scale=True)
    best = sqnr(weight.numpy(), _decoded(floats))
    assert sqnr(weight.numpy(), _decoded(halves, torch.float16)) > best - 1.5


@pytest.mark.parametrize("lut_dtype", [DType.INT8, DType.FP8_E5M2])
def test_small_channels_beside_large_ones_keep_their_digits_in_half_precision(lut_dtype: DType) -> None:
    """The scale of a table that channels share, times that of a channel, is no number of float16."""
    torch.manual_seed(0)
    size = torch.logspace(-5, 0, OUT)[:, None]
    weight = (torch.rand(OUT, IN) * 2 - 1) * size
    options: dict[str, Any] = {"lut_dtype": lut_dtype, "n_bits": 6, "enable_per_channel_scale": True}
    program = palettize_weights(_linear(weight, torch.float16), **options)
    decoded = _decoded(program, torch.float16)
    floats = _decoded(palettize_weights(_linear(weight.half().float()), **options))
    for row in range(OUT):
        exact = weight[row].half().float().numpy()
        assert sqnr(exact, decoded[row]) > min(sqnr(exact, floats[row]), 29.0) - 1.5
