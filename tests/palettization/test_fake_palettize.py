"""The simulator on its own: what it decodes to, its tables, its caches and its state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.quantization.spec import QuantizationSpec

from .networks import Simulator, simulator

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def decoded_by_hand(sim: Simulator, weight: torch.Tensor) -> torch.Tensor:
    """Look every entry up in a loop over its coordinates."""
    out = torch.empty_like(weight)
    rows, columns = sim.lut.shape[:2]
    dim = sim.cluster_dim
    for index in torch.cartesian_prod(*[torch.arange(n) for n in weight.shape]).view(-1, weight.ndim).tolist():
        group = (index[0] * rows // weight.shape[0], index[1] * columns // weight.shape[1] if weight.ndim > 1 else 0)
        entry = int(sim.indices[(index[0] // dim, *index[1:])])
        value = sim.lut[group[0], group[1], entry, index[0] % dim]
        if sim.per_channel_scale is not None:
            scale = sim.per_channel_scale
            value = value * (scale[index[0], 0] if scale.shape[1] == 1 else scale[0, index[1]])
        out[tuple(index)] = value
    return out


CASES = [
    {},
    {"n_bits": 1},
    {"n_bits": 5},
    {"granularity": PerGroupedChannelGranularity(axis=0, group_size=2)},
    {"granularity": PerGroupedChannelGranularity(axis=1, group_size=2)},
    {"granularity": PerGroupedChannelGranularity(axis=0, group_size=1)},
    {"enable_per_channel_scale": True},
    {"enable_per_channel_scale": True, "output_axis": 1},
    {"cluster_dim": 2},
    {"cluster_dim": 2, "granularity": PerGroupedChannelGranularity(axis=1, group_size=2)},
    {"cluster_dim": 4, "granularity": PerGroupedChannelGranularity(axis=0, group_size=4)},
    {"lut_qspec": QuantizationSpec(dtype="int8")},
    {"lut_qspec": QuantizationSpec(dtype="uint8", qscheme="asymmetric"), "cluster_dim": 2},
    {"lut_qspec": QuantizationSpec(dtype="int4"), "granularity": PerGroupedChannelGranularity(axis=0, group_size=2)},
    {"lut_qspec": QuantizationSpec(dtype="float8_e4m3fn"), "enable_per_channel_scale": True},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3)])
def test_the_output_is_what_indices_and_tables_say(case, dtype, shape):
    """Entry by entry, in the weight's dtype, for every option."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape).to(dtype))
    sim = simulator(**case)
    output = sim(weight)
    assert output.dtype == dtype
    assert torch.equal(output, decoded_by_hand(sim, weight))
    assert sim.indices.dtype == torch.uint8
    assert sim.lut.shape[2:] == (1 << sim.n_bits, sim.cluster_dim)
    assert sim.centroids.dtype == dtype


@pytest.mark.parametrize("case", CASES)
def test_every_vector_has_its_nearest_entry(case):
    """After quantization of the tables and division by the scale."""
    torch.manual_seed(1)
    weight = torch.randn(8, 4)
    sim = simulator(**case)
    output = sim(weight)
    vectors, context = sim.vectorize(weight)
    chosen, _ = sim.vectorize(output)
    tables = sim.lut.reshape(context.layout.groups, -1, sim.cluster_dim)
    best = torch.cdist(vectors.double(), tables.double()).amin(2)
    got = (vectors.double() - chosen.double()).norm(dim=2)
    assert torch.allclose(got, best, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scheme", "expected"),
    [
        # scale 4 / 127: codes 32, 64, 95 or 96, 127
        ("int8", "symmetric", [32 * 4 / 127, 64 * 4 / 127, 95 * 4 / 127, 4.0]),
        # scale 4 / 255, zero point -128: codes -64, -1, 63, 127
        ("int8", "asymmetric", [64 * 4 / 255, 127 * 4 / 255, 191 * 4 / 255, 4.0]),
        ("uint8", "asymmetric", [64 * 4 / 255, 127 * 4 / 255, 191 * 4 / 255, 4.0]),
    ],
)
def test_quantized_tables_are_their_codes_times_the_scale(dtype, scheme, expected):
    """Four weights, four entries: each reads what the quantization formulas give, to a step of the grid."""
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sim = simulator(n_bits=2, lut_qspec=QuantizationSpec(dtype=dtype, qscheme=scheme))
    sim(weight)
    assert torch.allclose(sim.lut.flatten().sort().values, torch.tensor(expected), atol=4 / 127 + 1e-4)
    scale, zero_point, codes = sim.lut_quantization_scale, sim.lut_quantization_zero_point, sim.quantized_lut
    assert codes.dtype == getattr(torch, dtype)
    assert torch.allclose(sim.lut, (codes.float() - zero_point) * scale, atol=1e-6)
    assert scale.shape == (1, 1, 1, 1)


def test_tables_without_quantization_have_no_codes():
    """And nothing exists before the first call."""
    sim = simulator()
    assert (sim.lut, sim.quantized_lut, sim.lut_quantization_scale, sim.indices) == (None, None, None, None)
    sim(torch.randn(4, 4))
    assert sim.lut is not None
    assert (sim.quantized_lut, sim.lut_quantization_scale, sim.lut_quantization_zero_point) == (None, None, None)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_fitting_to_quantized_tables_beats_quantizing_afterwards(dtype):
    """The palette and the assignment follow the grid, so the error is at most that of rounding a finished palette."""
    torch.manual_seed(2)
    weight = torch.randn(32, 32)
    plain = simulator(n_bits=4)
    plain(weight)
    fitted = simulator(n_bits=4, lut_qspec=QuantizationSpec(dtype=dtype))
    error = (fitted(weight) - weight).square().sum()
    rounded = simulator(n_bits=4, lut_qspec=QuantizationSpec(dtype=dtype))
    table = rounded.quantize_lut(plain.centroids)
    naive = (plain._palettize(table.reshape(plain.lut.shape), plain.indices, weight) - weight).square().sum()
    assert error <= naive + 1e-6
    if dtype == "int4":
        assert error < 0.9 * naive


def test_channel_scale_is_the_peak_of_each_output_channel():
    """Zero channels have the scale 1; a transposed convolution has its outputs in dimension 1."""
    weight = torch.tensor([[1.0, -3.0], [0.0, 0.0], [0.25, 0.5]])
    sim = simulator(enable_per_channel_scale=True)
    sim(weight)
    assert sim.per_channel_scale.tolist() == [[3.0], [1.0], [0.5]]
    sim = simulator(enable_per_channel_scale=True, output_axis=1)
    sim(weight)
    assert sim.per_channel_scale.tolist() == [[1.0, 3.0]]


def test_few_different_values_are_exact():
    """Entries that are not needed repeat the last one and are never referred to."""
    weight = torch.tensor([[1.0, 1.0, 2.0], [2.0, 1.0, 5.0]])
    sim = simulator(n_bits=3)
    assert torch.equal(sim(weight), weight)
    assert sim.lut.flatten().tolist() == [1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert int(sim.indices.max()) == 2


@pytest.mark.parametrize("scale", [1e-30, 2e-5, 1.0, 1e30])
def test_quality_does_not_depend_on_the_magnitude(scale):
    """Relative error of Gaussian weights at 4 bits is about 1 %, at any σ."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) * scale
    error = (simulator()(weight).double() - weight.double()).norm() / weight.double().norm()
    assert error < 0.11


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_name_the_tensor(broken):
    """Clustering them has no meaning."""
    sim = simulator()
    sim.tensor_fqn = "layers.3.weight"
    weight = torch.randn(4, 4)
    weight[0, 0] = broken
    with pytest.raises(ValueError, match=r"'layers\.3\.weight'.*(NaN|infinite)"):
        sim(weight)


def test_a_granularity_that_does_not_fit_takes_itself_out_of_use(caplog):
    """With a log message once; the weight passes as it is."""
    sim = simulator(granularity=PerGroupedChannelGranularity(axis=0, group_size=3))
    weight = torch.randn(5, 8)
    for _ in range(2):
        assert sim(weight) is weight
    assert sim.is_disabled()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Skipping palettization" in caplog.text


def test_the_axis_comes_from_the_op_when_left_open():
    """Outputs are dimension 0 for linear and convolution, 1 for transposed convolution."""
    for function, axis in ((F.linear, 0), (F.conv2d, 0), (F.embedding, 0), (F.conv_transpose2d, 1)):
        sim = Simulator(2, None, PerGroupedChannelGranularity(group_size=2), 1, False, op_to_optimize=function)
        assert sim.granularity.axis == axis
        assert sim.output_axis == axis


def test_the_dense_weight_is_kept_in_eval_mode():
    """The same tensor comes back until indices, tables or scale change; training frees it."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    sim = simulator(enable_per_channel_scale=True, lut_qspec=QuantizationSpec(dtype="int8"))
    first = sim(weight)
    assert sim(weight) is first
    for change in (
        lambda kept: sim.indices.fill_(0),
        lambda kept: sim.centroids.mul_(2),
        lambda kept: sim.per_channel_scale.mul_(0.5),
        lambda kept: sim._lut_fake_quantizer.qparams_calculator.scale.mul_(2),
        lambda kept: kept.add_(1),
    ):
        before = sim(weight)
        change(before)
        after = sim(weight)
        assert after is not before
        assert torch.equal(after, decoded_by_hand(sim, weight))
    sim.train()
    assert sim._dense._value is None
    sim.eval()
    sim.keep_dense_weight = False
    assert sim(weight) is not sim(weight)


def test_inference_mode_and_autograd_do_not_disturb_each_other():
    """A weight kept under inference mode cannot be saved for backward, so it is made again."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    sim = simulator()
    with torch.inference_mode():
        kept = sim(weight)
    x = torch.randn(2, 4, requires_grad=True)
    F.linear(x, sim(weight)).sum().backward()
    assert torch.equal(sim(weight), kept)
    assert x.grad is not None


def test_switch_and_buffer_agree():
    """Writing to the buffer, as checkpoints and other code do, is noticed."""
    weight = torch.randn(4, 4)
    sim = simulator(n_bits=1)
    palettized = sim(weight)
    sim.fake_palett_enabled[0] = 0
    assert sim(weight) is weight
    sim.enable_fake_palett()
    assert int(sim.fake_palett_enabled) == 1
    assert torch.equal(sim(weight), palettized)
    sim.disable_fake_palett()
    assert not sim.is_on


def test_saved_indices_are_trusted():
    """Also when the dense weight is another one; only a checkpoint without indices is assigned anew."""
    weight = torch.randn(8, 8)
    source = simulator(enable_per_channel_scale=True, lut_qspec=QuantizationSpec(dtype="int8"))
    expected = source(weight)
    state = source.state_dict()
    assert state["indices"].dtype == torch.uint8
    target = simulator(enable_per_channel_scale=True, lut_qspec=QuantizationSpec(dtype="int8"))
    target.load_state_dict(state)
    assert torch.equal(target(torch.randn(8, 8)), expected)
    del state["indices"]
    target = simulator(enable_per_channel_scale=True, lut_qspec=QuantizationSpec(dtype="int8"))
    target.load_state_dict(state, strict=False)
    assert torch.equal(target(weight), expected)


def test_vectors_of_coreai_opt_across_a_kernel_are_assigned_anew():
    """Its indices have the shape of ours, but stand for other vectors; our own checkpoint decodes as before."""
    options = {"cluster_dim": 2, "granularity": PerGroupedChannelGranularity(axis=1, group_size=2), "n_bits": 6}
    weight = torch.randn(8, 4, 3)
    source, own, foreign = (simulator(**options) for _ in range(3))
    expected = source(weight)
    own.load_state_dict(source.state_dict())
    assert torch.equal(own(weight), expected)
    state = source.state_dict() | {"indices": source.indices.flatten().roll(1).view(source.indices.shape)}
    foreign.load_state_dict(state)
    assert torch.equal(foreign(weight), expected)


def test_copies_keep_the_state_but_not_the_dense_weight():
    """Deep copies and pickles decode to the same."""
    weight = torch.randn(8, 8)
    sim = simulator(n_bits=3, lut_qspec=QuantizationSpec(dtype="uint8"))
    expected = sim(weight)
    for clone in (copy.deepcopy(sim), pickle.loads(pickle.dumps(sim))):
        assert clone._dense._value is None
        assert torch.equal(clone(weight), expected)


def test_a_change_of_dtype_follows():
    """``model.half()`` converts tables and scales; the output has the weight's dtype."""
    weight = torch.randn(8, 8)
    sim = simulator(enable_per_channel_scale=True)
    full = sim(weight)
    half = sim.half()(weight.half())
    assert half.dtype == torch.float16
    assert torch.allclose(half.float(), full, atol=2e-3)


def test_sensitivities_move_the_error_where_it_matters_less():
    """Setting them makes the palette anew; the important half gets the smaller error."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
    importance = torch.ones(32, 32) * 1e-3
    importance[weight > 0] = 1.0
    sim = simulator(n_bits=3)
    before = (sim(weight) - weight).square()
    sim.sensitivities = importance
    assert not sim.is_settled
    after = (sim(weight) - weight).square()
    assert after[weight > 0].sum() < 0.6 * before[weight > 0].sum()
    assert (importance * after).sum() < (importance * before).sum()
    with pytest.raises(ValueError, match=r"sensitivities of shape \(2,\)"):
        simulator(sensitivities=torch.ones(2))(weight)


def test_zeros_are_preserved_where_asked():
    """They have no part in the palette, and come out as exact zeros."""
    weight = torch.tensor([[0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 4.0, 0.0]])
    sim = simulator(n_bits=2, preserve_zeros=True)
    assert torch.equal(sim(weight), weight)
    assert sim.lut.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_custom_ops_can_reorder_their_weights():
    """A registered op brings its axis and the order in which its weight is cut."""
    from bitwright.palettization.kmeans.kmeans_support_mixins import _PalettizationSupportMixin
    from bitwright.palettization.kmeans.supported_ops_registry import _KMeansPalettizerSupportedOpsRegistry

    def matmul_from_the_left(weight, x):
        return x @ weight

    @_KMeansPalettizerSupportedOpsRegistry.register("left_matmul")
    class LeftMatmul(_PalettizationSupportMixin):
        ops = (matmul_from_the_left,)
        default_axis = 1

        def reshape_for_kmeans(self, weight, axis):
            return weight.T

        def reshape_to_original(self, clustered_weight, axis, original_shape):
            return clustered_weight.T

    try:
        sim = Simulator(
            8, None, PerGroupedChannelGranularity(group_size=2), 1, False, op_to_optimize=matmul_from_the_left
        ).eval()
        weight = torch.randn(6, 4)
        assert sim.granularity.axis == 1
        assert torch.equal(sim(weight), weight)
        assert sim.indices.shape == (4, 6)
    finally:
        _KMeansPalettizerSupportedOpsRegistry.unregister("left_matmul")
