"""FakeQuantizeConfig against the installed torchao: attributes, checks, outputs and gradients."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torchao.quantization import MappingType, PerAxis, PerGroup, PerRow, PerTensor, PerToken
from torchao.quantization.qat import Float8FakeQuantizeConfig as TorchaoFloat8Config
from torchao.quantization.qat import Float8FakeQuantizer, IntxFakeQuantizer
from torchao.quantization.qat import IntxFakeQuantizeConfig as TorchaoConfig
from torchao.quantization.quant_primitives import TorchAODType, ZeroPointDomain

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.qat import FakeQuantizeConfig, Float8FakeQuantizeConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTokenGranularity

INTS = [getattr(torch, f"int{bits}") for bits in range(1, 9)]
ALL = {"INT": ZeroPointDomain.INT, "FLOAT": ZeroPointDomain.FLOAT, "NONE": ZeroPointDomain.NONE}


def tensor(seed=0, shape=(8, 64), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) * 3 + 0.3
    return x.to(dtype).requires_grad_()


def assert_same(config, reference, x, **build):
    ours, theirs = config.build(**build), IntxFakeQuantizer(reference)
    a, b = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    y, z = ours(a), theirs(b)
    assert y.dtype == z.dtype
    assert torch.equal(y, z)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (z * weight).sum().backward()
    assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [*INTS, *(getattr(torch, f"uint{bits}") for bits in range(1, 9))])
@pytest.mark.parametrize("where", ["per_channel", "per_token", 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_and_gradients_are_those_of_torchao(dtype, where, symmetric):
    """Every dtype, granularity and mapping, float32 and bfloat16, bit for bit."""
    if where == "per_token" and symmetric:
        pytest.skip("torchao has no symmetric per-token form")
    given = {"group_size": where} if isinstance(where, int) else {"granularity": where}
    for i, data in enumerate((torch.float32, torch.bfloat16)):
        config = FakeQuantizeConfig(dtype, **given, is_symmetric=symmetric)
        assert_same(config, TorchaoConfig(dtype, **given, is_symmetric=symmetric), tensor(i, dtype=data))
        assert_same(config, config.to_torchao(), tensor(i + 9, dtype=data))


@pytest.mark.parametrize("domain", ["INT", "FLOAT"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_domains_and_precisions(domain, precision, symmetric):
    """Zero points as integers and as floating point numbers, scales in half precision, and a large eps."""
    given = {
        "group_size": 32,
        "is_symmetric": symmetric,
        "scale_precision": precision,
        "zero_point_precision": precision,
        "eps": 0.05,
    }
    config = FakeQuantizeConfig(torch.int4, **given, zero_point_domain=domain)
    for data in (torch.float32, torch.bfloat16):
        assert_same(config, TorchaoConfig(torch.int4, **given, zero_point_domain=ALL[domain]), tensor(dtype=data))


def test_domain_none_has_no_zero_point():
    """torchao 0.18 accepts NONE and then fails; here it is the symmetric form without a zero point."""
    fq = FakeQuantizeConfig(torch.int4, group_size=32, zero_point_domain=ZeroPointDomain.NONE).build()
    assert torch.equal(fq(tensor()), FakeQuantizeConfig(torch.int4, group_size=32).build()(tensor()))
    assert fq.calculate_qparams()[1] is None


def test_symmetric_per_token_is_the_formula():
    """max_abs / 7.5 of each row, by hand in float64."""
    x = tensor().detach()
    y = FakeQuantizeConfig(torch.int4, "per_token").build()(x)
    scale = x.double().abs().amax(1, keepdim=True) / 7.5
    torch.testing.assert_close(y, ((x / scale).round().clamp(-8, 7) * scale).float())


def test_static_takes_the_first_tensor():
    """is_dynamic=False: parameters of the first tensor for all, as in torchao."""
    for symmetric in (True, False):
        ours = FakeQuantizeConfig(torch.int4, "per_channel", is_dynamic=False, is_symmetric=symmetric)
        a, b = ours.build(), IntxFakeQuantizer(ours.to_torchao())
        for seed in range(3):
            assert torch.equal(a(tensor(seed)), b(tensor(seed)))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16, torch.float16])
def test_learned_ranges_in_half_precision(data, precision):
    """The first range is computed in the tensor's dtype and used in the scale's, as in torchao."""
    config = FakeQuantizeConfig(
        torch.int2, group_size=8, scale_precision=precision, is_dynamic=False, range_learning=True
    )
    for seed in range(4):
        theirs = IntxFakeQuantizer(config.to_torchao())
        theirs._initialized = True
        x = tensor(seed, dtype=data).detach()
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = config.build()(a), theirs(b)
        assert y.dtype == z.dtype
        assert torch.equal(y, z)
        y.float().square().sum().backward()
        z.float().square().sum().backward()
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("symmetric", [True, False])
def test_learned_ranges_train_as_in_torchao(symmetric):
    """Scale and zero point are parameters, with torchao's gradients and so the same values after some steps."""
    config = FakeQuantizeConfig(
        torch.int4, group_size=32, is_symmetric=symmetric, is_dynamic=False, range_learning=True,
        zero_point_precision=torch.float32,
    )  # fmt: skip
    ours, theirs = config.build(), IntxFakeQuantizer(config.to_torchao())
    theirs._initialized = True
    assert torch.equal(ours(tensor()), theirs(tensor()))
    pairs = [(ours.qparams_calculator.scale, theirs.scale)]
    if not symmetric:
        pairs.append((ours.qparams_calculator.zero_point, theirs.zero_point))
    assert [type(p) for p, _ in pairs] == [torch.nn.Parameter] * len(pairs)
    assert len(list(ours.parameters())) == len(pairs)
    for seed in range(3):
        for fq, params in ((ours, [p for p, _ in pairs]), (theirs, [q for _, q in pairs])):
            optimizer = torch.optim.SGD(params, lr=1e-3)
            (fq(tensor(seed)) * tensor(seed + 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in pairs:
            assert torch.equal(p.reshape(q.shape), q)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def random_config(draw):
    """Arguments that torchao computes with, and a shape that they fit."""
    where, symmetric = draw.choice(["per_token", "per_channel", "groups"]), draw.random() < 0.5
    symmetric = symmetric and where != "per_token"
    learning = draw.random() < 0.4
    given = {
        "is_symmetric": symmetric,
        "scale_precision": draw.choice([*FLOATS, None]),
        "zero_point_precision": draw.choice(FLOATS if learning and not symmetric else (torch.int32, *FLOATS)),
        "zero_point_domain": draw.choice([ZeroPointDomain.INT, ZeroPointDomain.FLOAT]),
        "is_dynamic": not learning and draw.random() < 0.7,
        "range_learning": learning,
        "eps": draw.choice([None, 1e-9, 1e-3, 0.05]),
    }
    size = draw.choice([2, 3, 8, 33])
    given |= {"group_size": size} if where == "groups" else {"granularity": where}
    shape = (draw.randint(1, 6), draw.randint(1, 4) * size)
    return given, (2, *shape) if where == "per_token" and draw.random() < 0.5 else shape


def random_tensor(draw, shape, dtype):
    """Normal numbers, heavy tails, rows of zeros, one sign, or nearly nothing."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw.getrandbits(32)))
    kind = draw.randrange(6)
    if kind == 0:
        x[0] = 0
    return [x, x**5, x.abs() + 0.5, -x.abs(), x * 1e-7, x * torch.exp(3 * x)][kind].to(dtype)


@pytest.mark.parametrize("seed", range(4))
def test_random_configs_are_those_of_torchao(seed):
    """Outputs and gradients of tensor, scale and zero point, bit for bit, in every precision."""
    draw = random.Random(seed)
    for _ in range(60):
        given, shape = random_config(draw)
        dtype = getattr(torch, f"{draw.choice(['', 'u'])}int{draw.randint(1, 8)}")
        config = FakeQuantizeConfig(dtype, **given)
        assert FakeQuantizeConfig.from_torchao(TorchaoConfig(dtype, **given)) == config
        assert FakeQuantizeConfig.from_spec(config.to_spec()) == config
        ours, theirs = config.build(), IntxFakeQuantizer(config.to_torchao())
        theirs._initialized = True
        data = draw.choice(FLOATS)
        first = random_tensor(draw, shape, data)
        while not first.any():
            first = random_tensor(draw, shape, data)
        found = []
        for simulator, owner in ((ours, ours.qparams_calculator), (theirs, theirs)):
            results = []
            for x in (first, first * 0.7):
                x = x.clone().requires_grad_()
                y = simulator(x)
                (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape).to(y.dtype)).sum().backward()
                results += [y.detach(), x.grad]
                if config.range_learning:
                    parameters = [owner.scale] if config.is_symmetric else [owner.scale, owner.zero_point]
                    results += [parameter.grad.float().flatten() for parameter in parameters]
                    simulator.zero_grad()
            found.append(results)
        for ours_is, theirs_is in zip(*found, strict=True):
            assert ours_is.dtype == theirs_is.dtype, config
            torch.testing.assert_close(ours_is, theirs_is, rtol=0, atol=0, equal_nan=True, msg=repr(config))


def test_rows_of_zeros_have_no_nan_in_float8():
    """A padded token stays zero and its gradient finite, where torchao's quantizer gives NaN; others are untouched."""
    for dtype in FLOATS:
        x = tensor(dtype=dtype).detach()
        x[3] = 0
        x.requires_grad_()
        config = Float8FakeQuantizeConfig()
        y, z = config.build()(x), Float8FakeQuantizer(config.to_torchao())(x)
        assert z[3].isnan().all()
        assert torch.equal(y[3], torch.zeros(64, dtype=dtype))
        assert torch.equal(y[:3], z[:3])
        y.square().sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradients_of_float8_do_not_overflow_in_half_precision(dtype):
    """The gradient of the scale adds up codes as large as 57344, more than float16 holds."""
    for bounds in ((None, None), (1e-12, 3.0)):
        config = Float8FakeQuantizeConfig(dtype, "per_tensor", *bounds)
        x = (tensor(shape=(64, 64)).detach() * 2).half().requires_grad_()
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 3
        (config.build()(x) * weight.half()).sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_float8_specs_quantize_a_model(mode):
    """FP8 rows for activations and weights: the linear layer computes with torchao's numbers, in both modes."""
    config = Float8FakeQuantizeConfig()
    quantizer_config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={0: config.to_spec()}, op_output_spec=None, op_state_spec={"weight": config.to_spec()}
        ),
        execution_mode=mode,
    )
    layer = torch.nn.Linear(64, 8)
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    x = tensor().detach()
    quantizer = Quantizer(layer, quantizer_config)
    prepared = quantizer.prepare((x,))
    theirs = Float8FakeQuantizer(config.to_torchao())
    assert torch.equal(prepared(x), torch.nn.functional.linear(theirs(x), theirs(w), b))
    with quantizer.training_mode():
        prepared(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in prepared.parameters())


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("bounds", [(None, None), (0.5, 2.0)])
def test_float8_is_that_of_torchao(granularity, dtype, bounds):
    """Outputs bit for bit; gradients, through the scale too, by the float64 definition (torchao rounds them to FP8)."""
    config = Float8FakeQuantizeConfig(dtype, granularity, *bounds)
    assert Float8FakeQuantizeConfig.from_torchao(config.to_torchao()).to_spec() == config.to_spec()
    for data in (torch.float32, torch.bfloat16):
        a, b = tensor(dtype=data), tensor(dtype=data)
        y, z = config.build()(a), Float8FakeQuantizer(TorchaoFloat8Config(dtype, granularity, *bounds))(b)
        assert torch.equal(y, z)
    a, b = tensor(), tensor().detach().double().requires_grad_()
    y = config.build()(a)
    dims = (1,) if isinstance(granularity, PerRow) else (0, 1)
    scale = b.abs().amax(dims, keepdim=True).clamp(*bounds) if any(bounds) else b.abs().amax(dims, keepdim=True)
    scale = scale / torch.finfo(dtype).max
    inside = (b / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    z = (inside + (y.detach() / scale - inside).detach()) * scale
    weight = torch.randn(8, 64)
    (y * weight).sum().backward()
    (z * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad.float(), rtol=1e-4, atol=1e-4)


def test_attributes_and_properties():
    """Strings, objects and flags mean the same; group_size and is_symmetric can be read and set."""
    assert isinstance(FakeQuantizeConfig(torch.int8, "per_token").granularity, PerToken)
    assert FakeQuantizeConfig(torch.int8, "per_channel").granularity == PerAxis(0)
    config = FakeQuantizeConfig(torch.int8, "per_group", group_size=32, is_symmetric=False)
    assert config == FakeQuantizeConfig(torch.int8, PerGroup(32), MappingType.ASYMMETRIC)
    assert config.group_size == 32
    assert config.mapping_type == MappingType.ASYMMETRIC
    assert config.zero_point_domain == ZeroPointDomain.INT
    config.group_size, config.is_symmetric = 64, True
    assert config.granularity == PerGroup(64)
    assert config.mapping_type == MappingType.SYMMETRIC
    with pytest.raises(ValueError, match="`group_size` is undefined"):
        _ = FakeQuantizeConfig(torch.int8, "per_token").group_size
    assert FakeQuantizeConfig(TorchAODType.INT4, group_size=8).dtype == torch.int4
    assert copy.deepcopy(config) == config
    assert FakeQuantizeConfig(torch.int4, PerBlockGranularity(axis=-1, block_size=32)).group_size == 32


def test_attributes_are_read_in_any_spelling():
    """What is assigned is what the constructor makes of it; unknown values are refused at once."""
    config = FakeQuantizeConfig(torch.int4, "per_channel")
    config.granularity, config.mapping_type, config.zero_point_domain = "per_token", "asymmetric", "int"
    config.dtype = torch.int8
    assert config == FakeQuantizeConfig(torch.int8, "per_token", "ASYMMETRIC")
    assert config.to_spec() == FakeQuantizeConfig(torch.int8, "per_token", "ASYMMETRIC").to_spec()
    for name, value in (("granularity", "per_row"), ("mapping_type", "odd"), ("dtype", torch.int16)):
        with pytest.raises(ValueError, match=f"{value}|choose"):
            setattr(config, name, value)


def test_float8_configs_are_equal_as_torchaos_are():
    """By their arguments, also after a way through a spec or through torchao; and they say what they are."""
    config = Float8FakeQuantizeConfig(torch.float8_e5m2, "per_tensor", 0.5, 2.0)
    assert Float8FakeQuantizeConfig.from_spec(config.to_spec()) == config
    assert Float8FakeQuantizeConfig.from_torchao(config.to_torchao()) == config
    assert config != Float8FakeQuantizeConfig(torch.float8_e5m2, "per_tensor", 0.5)
    assert config != FakeQuantizeConfig(torch.int8, "per_channel")
    assert "hp_value_ub=2.0" in repr(config)


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"granularity": "per_token", "group_size": 32}, ("group_size", "granularity")),
        ({"granularity": "per_group"}, ("granularity", "group_size")),
        ({}, ("granularity", "group_size")),
        (
            {"group_size": 8, "mapping_type": MappingType.SYMMETRIC, "is_symmetric": True},
            ("mapping_type", "is_symmetric"),
        ),
        ({"group_size": 8, "range_learning": True}, ("is_dynamic", "range_learning")),
        ({"group_size": 8, "zero_point_domain": "NONE", "is_symmetric": False}, ("zero_point_domain", "mapping_type")),
        (
            {"group_size": 8, "range_learning": True, "is_dynamic": False, "is_symmetric": False},
            ("range_learning", "zero_point_precision"),
        ),
        ({"granularity": PerAxis(1)}, ("axis", "PerAxis")),
        ({"granularity": "per_row"}, ("granularity", "per_row")),
        ({"group_size": 8, "zero_point_domain": None}, ("ZeroPointDomain.NONE", "None")),
        ({"group_size": 8, "eps": 0.0}, ("eps", "positive")),
        ({"group_size": 8, "eps": "1e-6"}, ("eps", "positive")),
        ({"group_size": 0}, ("group_size", "positive")),
        ({"group_size": "8"}, ("group_size", "'8'")),
        ({"granularity": PerGroup(-3)}, ("group_size", "-3")),
        ({"group_size": 8, "scale_precision": "float32"}, ("scale_precision", "'float32'")),
        ({"group_size": 8, "zero_point_precision": None}, ("zero_point_precision", "None")),
    ],
)
def test_bad_combinations_name_both_fields(kwargs, names):
    """Each refused combination says which arguments clash."""
    with pytest.raises(ValueError, match=names[0]) as error:
        FakeQuantizeConfig(torch.int4, **kwargs)
    assert all(name in str(error.value) for name in names)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        FakeQuantizeConfig(torch.int16, "per_token")
    with pytest.raises(ValueError, match=r"`dtype` torch\.float8_e5m2fnuz"):
        Float8FakeQuantizeConfig(torch.float8_e5m2fnuz)
    with pytest.raises(TypeError, match=r"Float8FakeQuantizeConfig, got IntxFakeQuantizeConfig without hp_value_lb"):
        Float8FakeQuantizeConfig.from_torchao(TorchaoConfig(torch.int4, group_size=8))
    with pytest.raises(TypeError, match=r"IntxFakeQuantizeConfig, got Float8FakeQuantizeConfig without mapping_type"):
        FakeQuantizeConfig.from_torchao(TorchaoFloat8Config())


def test_specs_and_back():
    """to_spec and from_spec are inverse; a plain spec carries over what a config can say."""
    configs = [
        FakeQuantizeConfig(torch.int4, group_size=16, eps=1e-3, scale_precision=torch.bfloat16),
        FakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        FakeQuantizeConfig(torch.int2, "per_channel", is_dynamic=False, range_learning=True),
        FakeQuantizeConfig(torch.int3, group_size=8, zero_point_domain="FLOAT", is_symmetric=False),
    ]
    for config in configs:
        assert FakeQuantizeConfig.from_spec(config.to_spec()) == config
        assert FakeQuantizeConfig.from_torchao(config.to_torchao()) == config
    plain = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=0))
    config = FakeQuantizeConfig.from_spec(plain)
    x = tensor().detach()
    reference = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=0))
    from bitwright.quantization.spec import QuantizationComponentFactory

    torch.testing.assert_close(
        config.build()(x), QuantizationComponentFactory.create_fake_quantizer(reference, "weight")(x)
    )
    with pytest.raises(ValueError, match="float_range"):
        FakeQuantizeConfig.from_spec(
            QuantizationSpec(granularity=PerTokenGranularity(), float_range=[-1, 1], qparam_calculator_cls="static")
        )
    with pytest.raises(ValueError, match="granularity"):
        FakeQuantizeConfig.from_spec(QuantizationSpec())


def test_specs_quantize_a_model():
    """W4 per group with A8 per token as in torchao's 8da4w: the linear layer computes with torchao's numbers."""
    weight = FakeQuantizeConfig(torch.int4, group_size=32)
    activation = FakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={0: activation.to_spec()}, op_output_spec=None, op_state_spec={"weight": weight.to_spec()}
        ),
        execution_mode="eager",
    )
    layer = torch.nn.Linear(64, 8)
    w, b = layer.weight.detach().clone(), layer.bias
    x = tensor().detach()
    prepared = Quantizer(layer, config).prepare((x,))
    expected = torch.nn.functional.linear(
        IntxFakeQuantizer(activation.to_torchao())(x), IntxFakeQuantizer(weight.to_torchao())(w), b
    )
    assert torch.equal(prepared(x), expected)


def test_groups_that_do_not_fit_are_told(caplog):
    """The tensor passes through; torchao ends in an assertion without a text."""
    config, x = FakeQuantizeConfig(torch.int4, group_size=48), tensor()
    assert torch.equal(config.build()(x), x)
    assert "dimension 1 of a tensor of shape (8, 64) is not divisible by block size 48" in caplog.text
    with pytest.raises(AssertionError):
        IntxFakeQuantizer(config.to_torchao())(x)
