"""Operators that converters lack, or get wrong for some arguments: right in the runtimes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.export.complex_numbers import without_complex_numbers
from bitwright.export.constants import compute_beforehand
from bitwright.export.conversion import ConversionError
from bitwright.export.operators import check_operators
from bitwright.export.targets import TARGETS
from bitwright.quantization import Quantizer, QuantizerConfig
from tests.export.models import Functions, assert_alike, together
from tests.measures import sqnr

CASES = {
    "an average with a divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=7),
    "an average with a negative divisor": lambda x: F.avg_pool2d(x, (2, 3), divisor_override=-2),
    "a padded average": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "cut off": lambda x: F.pad(x, (-1, 2, 1, -1)),
    "cut off in three dimensions": lambda x: F.pad(x, (-1, -1, 2, -2, 0, -1), value=2.5),
    "cut off and reflected": lambda x: F.pad(x, (-1, 2, 1, 1), mode="reflect"),
    "folded and cut off": lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 10), 3, padding=1),
    "windows": lambda x: x.unfold(3, 4, 2),
    "remainders of integers": lambda x: torch.remainder((x * 9).int(), 4) * x,
    "remainders of integers by others": lambda x: torch.remainder((x * 9).long(), (x.flip(0) * 9).long() * 2 + 1) * x,
    "sums and products of masks": lambda x: ((x > 0) + (x < -1)) * (x < 0.5) * x,
    "one mask or another": lambda x: torch.where(x > 0, x < 1, x > -1) * x,
    "one of two bools": lambda x: torch.where(x > 0, True, False) * x,
    "roundings of integers": lambda x: torch.floor((x * 9).int()) + (x * 9).long().ceil() + (x * 9).int().trunc() * x,
    "finite integers": lambda x: torch.isfinite((x * 9).int()) * x + torch.isnan((x * 9).long()),
    "extremes of masks": lambda x: (x > 0).amax(-1, keepdim=True) * x + (x > -1).amin((1, 2), keepdim=True),
    "asserted": lambda x: x.float() + torch.arange(10, device=x.device).to(x.dtype),
}
ANGLES = torch.arange(8.0).outer(0.1 ** torch.arange(5.0))
SEEN = torch.tensor([[True, False, True, True, False, True, False, True], [False] * 8] * 4)


def _checked(x):
    torch._check_tensor_all(x > -1e3, lambda: "x has a value that is too small")
    return x


def _rotated(x):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * torch.polar(torch.ones(8, 5), ANGLES)).flatten(-2)


def _complex(x):
    z = torch.complex(x[..., :5], x[..., 5:])
    one, other = z.chunk(2, dim=1)
    turned = torch.polar(one.abs(), other.angle()) * (1 + 2j) - one.conj() / (other + 3) + 1j * one.real
    both = torch.stack([turned.unsqueeze(0).expand(2, -1, -1, -1, -1)[1], torch.exp(1j * x[:, :2, :, :5]) * z[:, 1:3]])
    z = z.clone().mul_(2)
    chosen = torch.where(x[..., :5] > 0, z, 0.0) * 2 + 1 / (z + 4) - (1 - z) ** 2
    lengths = (z.mean(-1) / (2 - 1j)).abs() + chosen.sum(-1).real + (chosen - z).imag.mean()
    return torch.cat([torch.view_as_real(both).flatten(), both.sum(1).imag.flatten(), lengths.flatten()])


def _transforms(x):
    spectrum = torch.fft.rfft2(x, norm="ortho") * torch.polar(torch.ones(8, 6), torch.arange(48.0).view(8, 6))
    back = torch.fft.irfft2(spectrum, s=(8, 10), norm="ortho")
    several = torch.fft.ifftn(torch.fft.fftn(x, dim=(1, 3)) * 2, dim=(1, 3), norm="forward").imag
    return back + several + torch.fft.irfft(torch.fft.rfft(x, n=13), n=9).mean() + torch.fft.fft(x[..., :7]).real.sum()


MIXED = torch.polar(torch.ones(4, 4, 3, 4), torch.arange(192.0).view(4, 4, 3, 4))


def _written_spectrum(x):
    """As neural operators have it: the low frequencies are mixed, and the others are nothing."""
    spectrum = torch.fft.fftshift(torch.fft.rfft2(x, norm="forward"), dim=2)
    mixed = torch.zeros(*spectrum.shape[:2], 8, 6, dtype=torch.cfloat)
    mixed[:, :, 3:6, :4] = torch.einsum("bihw,iohw->bohw", spectrum[:, :, 3:6, :4], MIXED)
    mixed[:, :, 0] = x[:, :, 0, :6]
    return torch.fft.irfft2(torch.fft.ifftshift(mixed, dim=2), s=(8, 10), norm="forward")


def _complex_matrices(x):
    z, matrix = torch.complex(x[..., :5], x[..., 5:]), MIXED[0, 0]
    layer = F.linear(z[..., :4], matrix, MIXED[0, 0, :, 0]) + torch.tensor([1.0, 2, 3])
    other = torch.complex(x[1, :, :5, :5], x[1, :, 3:, 5:])
    several = torch.baddbmm(z[0], z[1], z[1, :, :5, :]) + torch.bmm(z[0], other)
    placed = z.masked_fill(x[..., :5] > 0, 1 - 2j).index_put((torch.tensor([0]),), z[1]) ** 3
    chosen = torch.where(x[..., :5] > 1, 2j, z) + torch.log(z + 3).sqrt() + F.pad(z[..., :3], (1, 1), value=0.5)
    joined = torch.cat([z[..., :4], x, (x * 9)[..., :1].int()], -1) + torch.cat(
        [torch.full_like(z, 3 - 1j), torch.ones_like(x, dtype=torch.cfloat)], -1
    )
    filled = z.new_full((3, 2), 1 + 2j) * x[0, 0, 0, 0] + z.new_zeros(3, 2) - torch.full((2,), 2.0, dtype=z.dtype)
    results = (layer, torch.mv(z[0, 0], z[0, 0, 0]), several, placed, chosen, joined, filled)
    return torch.cat([torch.view_as_real(one).flatten() for one in results])


def _spectrogram(x):
    frames = torch.stft(x.flatten(1), 32, 8, window=torch.hann_window(32), return_complex=True)
    return torch.log(frames.abs() ** 2 + 1e-2)


def _signals_again(x):
    signals, window = x.flatten(1), torch.hann_window(24)
    z = torch.stft(signals, 32, 8, 24, window, normalized=True, onesided=False, return_complex=True)
    halves = torch.stft(signals[0], 16, window=torch.ones(16), center=False, return_complex=True)
    again = torch.istft(z * 2, 32, 8, 24, window, normalized=True, length=80)
    few = torch.istft(halves, 16, window=torch.ones(16), center=False, length=40)
    return torch.cat([again.flatten(), few, torch.view_as_real(z).flatten()])


LACKED = {
    "checked": lambda x: _checked(x) * 2 + torch._is_all_true(x > -9) + torch._is_any_true(x < -9),
    "rotary embeddings in complex numbers": _rotated,
    "arithmetic of complex numbers": _complex,
    "Fourier transforms": _transforms,
    "a spectrum that is written": _written_spectrum,
    "matrices and choices of complex numbers": _complex_matrices,
    "a spectrogram": _spectrogram,
    "signals of spectrograms": _signals_again,
    "attention with other values": lambda x: (
        F.scaled_dot_product_attention(x, x.flip(2), x[..., :6], SEEN, scale=0.3).sum()
        + F.scaled_dot_product_attention(x, x.flip(2), torch.cat([x, x], -1), is_causal=True)
    ),
    "attention of one query to all": lambda x: F.scaled_dot_product_attention(x[:1], x, x.flip(2)),
    "attention without heads": lambda x: F.scaled_dot_product_attention(x[0, 0], x[1, 0], x[1, 1], SEEN),
    "attention in five dimensions": lambda x: (
        F.scaled_dot_product_attention(x[:, None], x[:, None].flip(3), x[:, None].cos(), SEEN)
        + F.scaled_dot_product_attention(x[:, None], x[:, None].sin(), x[:, None], x[:, None, :1, :, :8])
    ),
    "squeezed where it is not one": lambda x: x.squeeze(1) + x[:1].squeeze((0, 2)),
    "more windows than elements": lambda x: F.adaptive_avg_pool2d(x[..., :4], (9, 3)),
    "roots of squares, signs, larger numbers": lambda x: (
        torch.hypot(x, x.flip(0)) + torch.hypot(x * 1e30, x.flip(1)) * 1e-30 + torch.copysign(x, x.flip(0))
        + torch.copysign(x, -2.0) + torch.fmax(torch.where(x > 1, math.nan, x), x.flip(0))
        + torch.fmin(x, torch.where(x > 0, x, math.nan)) + F.rrelu(x)
    ),
    "distances": lambda x: (
        torch.cdist(x, x.flip(2)) + torch.cdist(x, x + 1, p=1) + torch.cdist(x, x + 1, p=3)
        + torch.cdist(x, x + 1, p=math.inf) + torch.cdist(x, x.flip(2), p=0)
        + torch.cdist(x.flatten(1, 2), x[:, 0] + 9).unflatten(1, (4, 8))
    ),
    "running products and extremes": lambda x: (
        torch.cumprod(x, -1) + torch.cumprod(x, 1) + torch.cummax(x, -1)[0] + torch.cummin(x, 1)[0]
        + torch.cummax(x, 2)[1] * x
    ),
    "medians": lambda x: x.median() * x + x.median(-1, True)[0] + x.median(1, True)[1] + x.kthvalue(3, -1, True)[0],
    "places in order": lambda x: (
        torch.searchsorted(x.sort(-1)[0], x.flip(-1)) * x
        + torch.searchsorted(torch.tensor([-1.0, 0.0, 0.5]), x, right=True) + torch.bucketize(x, torch.ones(1))
    ),
    "windows of different sizes": lambda x: torch.cat([
        F.adaptive_max_pool2d(x, (3, 4), return_indices=True)[1].flatten().float(),
        F.adaptive_max_pool1d(x[:, 0], 3).flatten(),
        F.adaptive_max_pool3d(x[:, None], (2, 3, 4)).flatten(),
        F.adaptive_avg_pool3d(x[:, None], (3, 3, 4)).flatten(),
    ]),
    "bits, powers and roundings": lambda x: (
        (((x * 9).int() << 2) * 1.0 + ((x * 9).int() >> 1)) * x + torch.exp2(x) + torch.ldexp(x, torch.tensor(3))
        + torch.signbit(x) * x + torch.logaddexp2(x, x.flip(0)) + torch.round(x, decimals=1) + x.logcumsumexp(-1)
    ),
    "moments, products and norms": lambda x: (
        torch.var_mean(x, -1, keepdim=True)[0] * x + torch.std_mean(x, (1, 2), correction=0, keepdim=True)[0]
        + torch.addmv(x[0, 0, :, 0], x[0, 0], x[0, 0, 0])[:, None] + torch.addbmm(x[0, 0], x[0, :, :, :8], x[1])
        + F.bilinear(x, x.flip(0), torch.ones(10, 10, 10) / 10, torch.ones(10)) + torch.dist(x, x.flip(0))
    ),
    "numbers less integers, and divided by them": lambda x: (
        (1.5 - (x * 9).int()) * x + torch.rsub((x * 9).int(), 1, alpha=2) + torch.rsub(x, 0.5, alpha=3)
        + 7.5 // ((x * 9).int() * 2 + 1) + (x * 9).long() // 1.5
    ),
    "averages at places": lambda x: (
        x.scatter_reduce(1, (x[:, :3] > 0).long(), x[:, :3], "mean")
        + x.scatter_reduce(1, (x[:, :3] > 0).long(), x[:, :3], "mean", include_self=False)
    ),
    "extremes and products at places": lambda x: (
        x.scatter_reduce(1, (x[:, :3] > 0).long() * 2, x[:, :3] * 2, "amax")
        + x.scatter_reduce(-1, (x[..., :7] * 2).long() % 10, x * 2, "amin", include_self=False)
        + x.scatter_reduce(2, (x[:1, :3] > 0).long(), x[1:, 1:], "prod")
        + x.scatter_reduce(0, (x[:1] > 0).long(), x.flip(0), "prod", include_self=False)
        + x.mean().scatter_reduce(0, torch.tensor(0), x[0, 0, 0, 0], "amax")
    ),
    "added and multiplied at places": lambda x: (
        x.scatter(1, (x[:, :3, :7] > 0).long(), x, reduce="add")
        + x.scatter(-1, (x[:1] > 0).long() * 3, 0.5, reduce="multiply")
    ),
    "at fewer places than values": lambda x: (
        x.scatter(1, (x[:, :1, :7] > 0).long() * 2, x * 2)
        + x.scatter_add(1, (x[..., :7] > 0).long(), x * 2)
        + x.gather(1, (x[:1, :3, :, :1] > 0).long()).sum()
    ),
    "positions and frequencies": lambda x: (
        torch.einsum("i,j->ij", torch.arange(8), torch.linspace(0.1, 1, 10)).sin() * x
        + torch.einsum("i,bcij->bcij", torch.arange(8), x)
        + torch.einsum("i,j,ij->ij", torch.arange(8), x[0, 0, 0], x[0, 1])
    ),
    "places of the smallest": lambda x: F.one_hot(x.argmin(1), 10).movedim(-1, 1)[:, :4, :, :10] + x.argmin() * x,
    "sorts and quantiles": lambda x: torch.msort(x) + torch.quantile(x, 0.3, -1, True) + x.nanquantile(0.8, 1, True),
}  # fmt: skip
"""What one or more of ONNX, ExecuTorch and Core AI have no operator for."""

NOT_ONNX = {
    "along a dimension of a number": lambda x: x * torch.stack([
        x.mean().cumsum(0), x.mean().topk(1)[0], x.mean().max(0)[0], x.mean().log_softmax(0), x.mean().softmax(0),
        x.mean().flip(0), x.mean().sort()[0], x.mean().cumprod(-1), x.mean().gather(0, torch.tensor(0)),
        x.mean().amax(0, keepdim=True), x.mean().argmax(0),
    ]).sum(),
}  # fmt: skip
"""What ONNX Runtime refuses: the largest, and the mirror image, of a number."""

ONNX_ONLY = {
    "cross entropy": lambda x: (
        F.cross_entropy(x, x.argmax(1), torch.tensor([1.0, 2, 3, 4]), ignore_index=1, label_smoothing=0.1)
        + F.cross_entropy(x, x.flip(0).softmax(1))
        + F.cross_entropy(x, x.argmax(1), reduction="none")
    ),
    "an average of three dimensions with a divisor": lambda x: F.avg_pool3d(x, 2, divisor_override=5),
    "products of integers and sums": lambda x: torch.addmm(
        (x * 9).int()[0, 0, :, :8], (x * 9).int()[0, 0], (x * 9).int()[0, 1].T, beta=2, alpha=3
    ).float(),
    "statistics of the batch": lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4), training=True, eps=0.5),
    "statistics of each input": lambda x: F.batch_norm(
        x.reshape(1, 8, 8, 10), torch.zeros(8), torch.ones(8), torch.arange(8.0), -torch.ones(8), training=True
    ),
}
"""ExecuTorch has no kernels for averages in three dimensions or products of integers, and no norms with running
statistics; losses it was not asked for."""


_MANY_OPERATORS = {
    "executorch": (
        "windows of different sizes", "Fourier transforms", "arithmetic of complex numbers",
        "bits, powers and roundings", "running products and extremes", "matrices and choices of complex numbers",
    ),
    "onnx": ("windows of different sizes", "arithmetic of complex numbers", "matrices and choices of complex numbers"),
    "coreai": ("windows of different sizes", "matrices and choices of complex numbers"),
}  # fmt: skip
"""What becomes hundreds of them: each takes as long as ten others, and is left to `make test-all`."""


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Conv2d(4, 4, 1), function

    def forward(self, x):
        return self.function(self.layer(x))


def _cases(target, names):
    """Several operators in one program; not for ExecuTorch, whose time is that of its operators."""
    few = [name for name in names if name not in _MANY_OPERATORS[target]]
    groups = [pytest.param([name], id=name) for name in few] if target == "executorch" else together(few)
    many = [pytest.param([name], id=name, marks=pytest.mark.slow) for name in _MANY_OPERATORS[target]]
    return [pytest.param(target, *case.values, id=f"{target}-{case.id}", marks=case.marks) for case in groups + many]


@pytest.mark.parametrize(
    ("target", "names"),
    _cases("onnx", CASES | LACKED | ONNX_ONLY)
    + _cases("executorch", CASES | LACKED | NOT_ONNX)
    + _cases("coreai", LACKED | NOT_ONNX),
)
def test_right_in_the_runtime(target, names, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 10)
    model = Functions(nn.Conv2d(4, 4, 1), [(CASES | LACKED | NOT_ONNX | ONNX_ONLY)[name] for name in names]).eval()
    assert not check_operators(model, target, (x,))
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).eval()
    with torch.no_grad():
        expected = ready(x)
    path = TARGETS[target].write(ready, (x,), tmp_path / f"model{TARGETS[target].suffix}", {}, None)
    assert_alike(names, expected, TARGETS[target].run(path, (x,)))


class Constants(nn.Module):
    """Resizes position embeddings that it has for another size, and finds the vectors of a matrix of its own.

    And a quantile of a number that it writes down, as Gemma 3n does, which PyTorch detaches in place.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.register_buffer("matrix", torch.randn(8, 8))

    def forward(self, x):
        positions = F.interpolate(self.positions, size=(3, 3), mode="bicubic", antialias=True)
        values, vectors = torch.linalg.eigh(self.matrix + self.matrix.T)
        quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.9))
        return self.layer(x + positions.flatten(2).transpose(1, 2)) @ vectors + values * quantile


@pytest.mark.parametrize("target", ["onnx", "executorch", "coreai"])
def test_what_reads_no_inputs_is_computed_beforehand(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    x, model = torch.randn(2, 9, 8), Constants().eval()
    assert not check_operators(model, target, (x,))
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="graph")).prepare((x,)).eval()
    path = TARGETS[target].write(ready, (x,), tmp_path / f"model{TARGETS[target].suffix}", {}, None)
    assert sqnr(ready(x), TARGETS[target].run(path, (x,))[0]) > 110


class OfLayers(nn.Module):
    """Inverts what its layer makes of a table, and lets it read what another operator makes that torch.onnx lacks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.eye(8) + 0.1 * torch.randn(8, 8))

    def forward(self, x):
        made = self.layer(self.table)
        return self.layer(torch.copysign(x, -x)) @ torch.linalg.inv(made) + torch.lgamma(made.relu() + 1)[:2]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("preset", ["w4", "w8a8"])
def test_what_reads_no_inputs_is_computed_beforehand_of_what_is_quantized(preset, mode, tmp_path):
    """The plan asks about the float model, which has no stand-ins in between, so that the export must take them."""
    target = TARGETS["onnx"]
    if target.missing() is not None:
        pytest.skip("needs onnx")
    torch.manual_seed(0)
    x = torch.randn(2, 8)
    quantizer = Quantizer(OfLayers().eval(), getattr(QuantizerConfig.presets, preset)(execution_mode=mode))
    assert not [problem for problem in quantizer.plan((x,), target="onnx").problems if problem.severity == "error"]
    ready = quantizer.prepare((x,))
    with quantizer.calibration_mode():
        ready(x)
    path = target.write(ready.eval(), (x,), tmp_path / "model.onnx", {}, None)
    assert sqnr(ready(x), target.run(path, (x,))[0]) > 110


def test_what_an_input_is_written_to_is_not_computed_beforehand():
    class Written(nn.Module):
        def forward(self, x):
            table = torch.zeros(4, 4)
            table[0] = x
            return torch.linalg.inv(table + torch.eye(4)), torch.linalg.inv(torch.eye(4) * 2)

    x = torch.randn(4)
    program = torch.export.export(Written(), (x,))
    assert compute_beforehand(program, lambda node: "inv" in str(node.target))
    assert sum(node.op == "call_function" and "inv" in str(node.target) for node in program.graph.nodes) == 1
    for expected, actual in zip(Written()(x), program.module()(x), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("name", ["arithmetic of complex numbers", "matrices and choices of complex numbers"])
def test_pairs_compute_what_complex_numbers_do(name):
    x = torch.randn(2, 4, 8, 10)
    model = Model(LACKED[name]).eval()
    program = without_complex_numbers(torch.export.export(model, (x,)))
    assert sqnr(model(x), program.module()(x)) > 100


def test_products_at_places_are_no_products_of_parts():
    def scattered(x, reduce):
        z = torch.complex(x[..., :5], x[..., 5:])
        return torch.view_as_real(z.scatter(1, (x[:, :2, :, :5] > 0).long(), z[:, 2:], reduce=reduce))

    x = torch.randn(2, 4, 8, 10)
    programs = [torch.export.export(Model(lambda x, how=how: scattered(x, how)), (x,)) for how in ("add", "multiply")]
    added, multiplied = map(without_complex_numbers, programs)
    assert multiplied is None
    assert sqnr(programs[0].module()(x), added.module()(x)) > 100


def test_transforms_of_one_size_share_their_matrices():
    model = Model(lambda x: torch.fft.fft(torch.fft.fft(x)).real + torch.fft.rfft(x, dim=2).abs().sum())
    x = torch.randn(1, 4, 8, 8)
    program = without_complex_numbers(torch.export.export(model, (x,)))
    waves = [tensor for name, tensor in program.state_dict.items() if name.startswith("waves")]
    assert sorted(tuple(one.shape) for one in waves) == [(8, 5), (8, 5), (8, 8), (8, 8)]
    assert torch.allclose(program.module()(x), model(x), atol=1e-4)


@pytest.mark.parametrize("target", ["executorch", "coreai"])
def test_complex_numbers_without_a_form_are_refused_in_the_plan(target):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    model = Model(lambda x: torch.view_as_real(torch.linalg.inv(torch.complex(x[..., :8], x[..., 2:])))).eval()
    problems = check_operators(model, target, (torch.randn(2, 4, 8, 10),))
    assert any("inv" in problem.message or "complex" in problem.message for problem in problems)


@pytest.mark.parametrize("target", ["onnx", "executorch", "coreai"])
def test_small_numbers_are_not_taken_for_nothing(target, tmp_path):
    """torch.onnx's optimizer drops ``+ 1e-8``, and quotients of two zeros become NaN."""
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    model = Model(lambda x: x.relu() / (x.relu().sum(-1, keepdim=True) + 1e-12) + (x.relu() - 1e-9).clamp(max=0) * 1e9)
    model.layer.weight.data.fill_(-1.0)
    model.layer.bias.data.zero_()
    model.eval()
    x = torch.rand(2, 4, 8, 10) * (torch.arange(8.0)[:, None] - 3)  # nothing is left of half of the rows
    expected = model(x)
    assert (expected[:, :, 4:] <= 0).all()
    path = TARGETS[target].write(model, (x,), tmp_path / f"model{TARGETS[target].suffix}", {}, None)
    (actual,) = TARGETS[target].run(path, (x,))
    assert sqnr(expected, actual) > 100


def test_onnx_keeps_factors_near_one(tmp_path):
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model, x = Model(lambda x: x * 1.000005 / 0.999995 - x).eval(), torch.randn(2, 4, 8, 10)
    path = TARGETS["onnx"].write(model, (x,), tmp_path / "model.onnx", {}, None)
    assert sqnr(model(x), TARGETS["onnx"].run(path, (x,))[0]) > 30


def test_onnx_refuses_a_divisor_of_windows_that_stand_out():
    pytest.importorskip("onnxscript")
    model = Model(lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=7)).eval()
    (problem,) = check_operators(model, "onnx", (torch.randn(2, 4, 8, 10),))
    assert "ceil_mode and divisor_override" in problem.message


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_onnx_refuses_antialiased_factors_to_which_sizes_are_rounded(mode, tmp_path):
    """ONNX Runtime would take others."""
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    x = torch.randn(2, 4, 8, 10)
    model = Model(lambda x: F.interpolate(x, scale_factor=1.3, mode=mode, antialias=True)).eval()
    (problem,) = check_operators(model, "onnx", (x,))
    assert "give size, or recompute_scale_factor=True" in problem.message
    for scale, again in ((1.3, True), (2, None)):
        model = Model(
            lambda x, scale=scale, again=again: F.interpolate(
                x, scale_factor=scale, mode=mode, antialias=True, recompute_scale_factor=again
            )
        ).eval()
        path = TARGETS["onnx"].write(model, (x,), tmp_path / "model.onnx", {}, None)
        assert sqnr(model(x), TARGETS["onnx"].run(path, (x,))[0]) > 110


NO_KERNEL = {
    "largest values of integers": lambda x: F.max_pool2d((x * 9).int(), 2).float(),
    "convolutions in float64": lambda x: F.conv2d(x.double(), torch.ones(2, 4, 3, 3, dtype=torch.float64)).float(),
    "an einsum of dots that vanish": lambda x: torch.einsum("...ik,...j->ij", x[:, 0], x[0, 0, 0]),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_what_onnx_runtime_has_no_kernel_for_is_refused_in_the_plan(name, tmp_path):
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model, x = nn.Sequential(nn.Identity(), Model(NO_KERNEL[name])).eval(), torch.randn(2, 4, 8, 10)
    (problem,) = check_operators(model, "onnx", (x,))
    assert problem.where == "1"
    assert "ONNX Runtime" in problem.message
    path = TARGETS["onnx"].write(model, (x,), tmp_path / "model.onnx", {}, None)
    with pytest.raises(ConversionError, match="ONNX Runtime"):
        TARGETS["onnx"].run(path, (x,))


class Limits(nn.Module):
    """Clamps of one tensor by limits of its own, as Gemma 4's layers have them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, value in (("low", "-inf"), ("high", "inf"), ("lowest", "-inf"), ("highest", "inf")):
            self.register_buffer(name, torch.tensor(float(value)))

    def forward(self, x):
        y = self.layer(x).relu() * 2
        return torch.clamp(y, self.low, self.high) + torch.clamp(y, self.lowest, self.highest) * 3


def test_onnx_has_the_constants_of_joined_clamps(tmp_path):
    """The optimizer of torch.onnx forgets some, and ONNX Runtime refuses the file."""
    if TARGETS["onnx"].missing() is not None:
        pytest.skip("needs onnx")
    model, x = Limits().eval(), torch.randn(2, 8)
    path = TARGETS["onnx"].write(model, (x,), tmp_path / "model.onnx", {}, None)
    assert sqnr(model(x), TARGETS["onnx"].run(path, (x,))[0]) > 110


@pytest.mark.parametrize("sizes", [None, ({0: torch.export.Dim("batch", max=4)},)], ids=["fixed", "dynamic"])
def test_kernels_that_executorch_lacks_are_named(sizes, tmp_path):
    """Its runtime says a number only, and sizes have no part in it."""
    target = TARGETS["executorch"]
    if target.missing() is not None:
        pytest.skip("needs executorch")
    x, model = torch.randn(2, 4, 8, 10), nn.Sequential(Model(lambda x: x[:, torch.randperm(4)])).eval()
    ready = Quantizer(model, QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).eval()
    with pytest.raises(ConversionError, match=r"^ExecuTorch's runtime has no kernel for aten::randperm\.out"):
        target.write(ready, (x,), tmp_path / "model.pte", {}, sizes)
    assert not list(tmp_path.iterdir())
    if sizes is None:
        (problem,) = check_operators(model, "executorch", (x,))
        assert problem.where == "0"
        assert "no kernel for the operator aten::randperm.out" in problem.message


class Segments(nn.Module):
    """The largest and the product of the values of each segment, as TAPAS reduces the words of a cell."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 6)

    def forward(self, x):
        values = self.project(x)
        segments = (values[..., :1] > 0).long().expand_as(values)
        places = torch.zeros_like(values[:, :4])
        return places.scatter_reduce(1, segments, values, "amax", include_self=False), (places + 2).scatter_reduce(
            1, segments, values, "prod"
        )


@pytest.mark.parametrize("target", ["coreai", "executorch"])
def test_segments_are_reduced(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    x, shapes = torch.randn(2, 5, 16), ({0: torch.export.Dim("b", max=4), 1: torch.export.Dim("s", min=4, max=8)},)
    ready = Quantizer(Segments().eval(), QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).eval()
    path = TARGETS[target].write(ready, (x,), tmp_path / f"m{TARGETS[target].suffix}", {}, shapes)
    x = torch.randn(3, 7, 16)
    with torch.no_grad():
        expected = ready(x)
    assert min(sqnr(*pair) for pair in zip(expected, TARGETS[target].run(path, (x,)), strict=True)) > 100


class Strides(nn.Module):
    """Fills tensors with its strides, as Ultralytics' detectors do; its sparse heads, as Whisper's, are not read."""

    def __init__(self):
        super().__init__()
        self.layer, self.strides = nn.Conv2d(3, 4, 3, 2, 1), torch.tensor([8.0, 16.0])
        self.register_buffer("heads", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, x):
        y = self.layer(x).flatten(2)
        first, second = (torch.full((y.shape[2], 1), stride, dtype=y.dtype) for stride in self.strides)
        return y * first.T + second.sum() + torch.full_like(y, self.strides[1])


@pytest.mark.parametrize("target", ["coreai", "executorch", "onnx"])
def test_tensors_are_filled_with_numbers_of_tensors(target, tmp_path):
    if TARGETS[target].missing() is not None:
        pytest.skip(f"needs {target}")
    torch.manual_seed(0)
    x, shapes = torch.randn(2, 3, 8, 8), ({0: torch.export.Dim("b", max=4)},)
    ready = Quantizer(Strides().eval(), QuantizerConfig.presets.w8(execution_mode="eager")).prepare((x,)).eval()
    path = TARGETS[target].write(ready, (x,), tmp_path / f"m{TARGETS[target].suffix}", {}, shapes)
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        assert sqnr(ready(x), TARGETS[target].run(path, (x,))[0]) > 100
