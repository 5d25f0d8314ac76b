"""LSQ, LSQ+ and PACT: gradients against float64 autograd of the definitions, initial values, life in a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.artifact import Artifact
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._bits import set_dtype
from bitwright.quantization.qat import parameter_groups
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, QuantizationComponentFactory
from tests.matrix import each_pair

GRANULARITIES = {
    "per_tensor": None,
    "per_channel": PerChannelGranularity(axis=0),
    "per_block": PerBlockGranularity(axis=1, block_size=8),
}


def make(kind, target="weight", granularity=None, **spec):
    if granularity is not None:
        spec["granularity"] = granularity
    return QuantizationComponentFactory.create_fake_quantizer(QuantizationSpec(fake_quantize_cls=kind, **spec), target)


def tensor(seed=0, shape=(6, 32)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def straight(x):
    """Rounding with the gradient of the identity."""
    return x + (x.round() - x).detach()


def spread(per_block, x):
    for dim in range(x.ndim):
        per_block = per_block.repeat_interleave(x.shape[dim] // per_block.shape[dim], dim)
    return per_block


def gradient_scale(fq, x):
    """1 / sqrt(N * Qp): weights that share a step, or features of one sample that do (LSQ section 2.2)."""
    shared = x.numel() / fq.qparams_calculator.scale.numel()
    if fq.quantization_target.value == "activation":
        shared /= x.shape[0]
    return (shared * fq.quant_max) ** -0.5


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ["int4", "int8", "int2"])
@pytest.mark.parametrize("target", ["weight", "activation"])
def test_lsq_gradients_are_those_of_the_definition(granularity, dtype, target):
    """clip, round with a straight-through gradient, rescale: float64 autograd of LSQ eq. 1 and 2."""
    if target == "activation" and granularity == "per_block":
        pytest.skip("same code")
    fq = make("lsq", target, GRANULARITIES[granularity], dtype=dtype)
    fq(tensor())
    x, weight = tensor(1).requires_grad_(), tensor(2).double()
    (fq(x) * weight).sum().backward()
    s = fq.qparams_calculator.scale.detach().double().requires_grad_()
    v = x.detach().double().requires_grad_()
    step = spread(s, v)
    y = straight((v / step).clamp(fq.quant_min, fq.quant_max)) * step
    torch.testing.assert_close(fq(x).detach(), y.detach().float())
    (y * weight).sum().backward()
    torch.testing.assert_close(x.grad, v.grad.float())
    expected = s.grad * gradient_scale(fq, x)
    torch.testing.assert_close(fq.qparams_calculator.scale.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("formulation", ["minval", "zp"])
def test_lsq_plus_gradients_are_those_of_the_definition(granularity, dtype, formulation):
    """Scale and offset by float64 autograd of LSQ+ eq. 3; with integer zero points at the rounded offset."""
    fq = make(
        "lsq_plus",
        "activation",
        GRANULARITIES[granularity],
        dtype=dtype,
        qscheme="asymmetric",
        qformulation=formulation,
    )
    fq(tensor() + 0.4)
    calculator = fq.qparams_calculator
    x, weight = (tensor(1) * 2 + 0.4).requires_grad_(), tensor(2).double()
    (fq(x) * weight).sum().backward()
    s = calculator.scale.detach().double().requires_grad_()
    b = calculator.offset.detach().double()
    if formulation == "zp":
        b = -(-b / s.detach()).round().clamp(fq.quant_min, fq.quant_max) * s.detach()
    b.requires_grad_()
    v = x.detach().double().requires_grad_()
    step, offset = spread(s, v), spread(b, v)
    y = straight(((v - offset) / step).clamp(fq.quant_min, fq.quant_max)) * step + offset
    torch.testing.assert_close(fq(x).detach(), y.detach().float())
    (y * weight).sum().backward()
    factor = gradient_scale(fq, x)
    torch.testing.assert_close(x.grad, v.grad.float())
    torch.testing.assert_close(calculator.scale.grad.double(), s.grad * factor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(calculator.offset.grad.double(), b.grad * factor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("formulation", ["minval", "zp"])
def test_ranges_that_begin_at_zero_keep_doing_so(formulation):
    """What a ReLU gives is never negative: the step learns as with LSQ, and no code is given away below zero."""
    spec = {"dtype": "int4", "qscheme": "asymmetric", "range_calculator_cls": "mse", "qformulation": formulation}
    shifting, fixed = (make(kind, "activation", **spec) for kind in ("lsq_plus", "lsq"))
    x, weight = tensor().relu(), tensor(1)
    for fq in (shifting, fixed):
        fq(x)
        optimizer = torch.optim.SGD([{"params": list(fq.parameters()), "lr": 0.02}])
        for _ in range(20):
            optimizer.zero_grad()
            (fq(x) * weight).sum().backward()
            optimizer.step()
    for ours, theirs in zip(shifting.calculate_qparams(), fixed.calculate_qparams(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert shifting.qparams_calculator.offset.item() == 0
    assert shifting.calculate_qparams()[1].item() == -8


def test_a_few_negative_values_move_the_offset():
    """The range of a GELU's output begins with less than half a step below zero; the offset may make room for it."""
    fq = make("lsq_plus", "activation", dtype="int4", qscheme="asymmetric", range_calculator_cls="mse")
    x = F.gelu(tensor() * 3)
    fq(x)
    assert fq.calculate_qparams()[1].item() == -8
    (fq(x) * x.sign()).sum().backward()
    assert fq.qparams_calculator.offset.grad.item() != 0


def test_pact_gradients_are_those_of_the_definition():
    """y = 0.5 (|x| - |x - a| + a), quantized with a straight-through gradient (PACT eq. 1 to 3)."""
    fq = make("pact", "activation", dtype="uint4", qscheme="asymmetric")
    fq(tensor())
    with torch.no_grad():
        fq.qparams_calculator.alpha.mul_(0.4)
    x, weight = tensor(1).requires_grad_(), tensor(2).double()
    (fq(x) * weight).sum().backward()
    a, v = fq.qparams_calculator.alpha.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    clipped = 0.5 * (v.abs() - (v - a).abs() + a)
    y = clipped + ((clipped * 15 / a).round() * a / 15 - clipped).detach()
    torch.testing.assert_close(fq(x).detach(), y.detach().float())
    (y * weight).sum().backward()
    torch.testing.assert_close(x.grad, v.grad.float())
    torch.testing.assert_close(fq.qparams_calculator.alpha.grad.double(), a.grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"'pact'.*weight.*'lsq'"):
        make("pact", "weight")


def test_initial_values():
    """LSQ begins at 2 mean|v| / sqrt(Qp) over all batches of the calibration; other range finders are obeyed."""
    fq = make("lsq", "activation", dtype="int4").eval()
    fq.reset_statistics()
    batches = [tensor(seed) * (seed + 1) for seed in range(4)]
    for batch in batches:
        fq(batch)
    mean = torch.cat(batches).abs().mean()
    torch.testing.assert_close(fq.qparams_calculator.scale.item(), (2 * mean / 7**0.5).item())
    fq = make("lsq", "weight", dtype="int4", range_calculator_cls="mse", qformulation="minval")
    fq(torch.randn(200_000, generator=torch.Generator().manual_seed(0)))
    assert fq.qparams_calculator.scale.item() == pytest.approx(0.3386, rel=0.02)
    relu = make("lsq", "activation", dtype="uint4", qscheme="asymmetric")
    relu(tensor().relu())
    assert relu.qparams_calculator.zero_point.item() == 0


def test_training_batches_leave_the_learned_step_alone():
    """In train mode only the first tensor sets the step; in eval mode with the observer on each one counts."""
    fq = make("lsq", "activation", dtype="int4")
    fq(tensor())
    parameter, first = fq.qparams_calculator.scale, fq.qparams_calculator.scale.clone()
    fq(tensor(1) * 100)
    assert torch.equal(parameter, first)
    fq.eval()(tensor(1) * 100)
    assert fq.qparams_calculator.scale is parameter
    assert parameter.item() > first.item()


def _write(parameters, how):
    """Write as averages of weights and optimizers of other libraries do: no version advances."""
    if how == "copy":
        for p in parameters:
            p.data.copy_(p.detach() * 0.5)
    elif how == "mul":
        for p in parameters:
            p.data.mul_(3)
    else:
        torch._foreach_mul_([p.data for p in parameters], 0.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["copy", "mul", "foreach"])
@pytest.mark.parametrize("kind", ["lsq", "lsq_plus", "pact"])
def test_writes_through_data_are_noticed(kind, how, training):
    """The learned parameters are what they say, whoever wrote them; one that nobody wrote stays the same tensor."""
    granularity = None if kind == "pact" else GRANULARITIES["per_channel"]
    fq = make(kind, "activation" if kind == "pact" else "weight", granularity, dtype="uint4", qscheme="asymmetric")
    x = nn.Parameter(tensor())
    fq(x)
    fq.disable_observer()
    fq.train(training)
    fq(x)
    assert fq.qparams_calculator.get_qparams()[0] is fq.qparams_calculator.get_qparams()[0]
    _write(fq.parameters(), how)
    twin = copy.deepcopy(fq)
    expected, found = twin(x), fq(x)
    assert torch.equal(found, expected)
    for one, other in zip(fq.calculate_qparams(), twin.calculate_qparams(), strict=True):
        assert one is other or torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes(dtype):
    """Of any number of bytes: a step for the whole tensor is one element."""
    fq = make("lsq", "weight", GRANULARITIES["per_tensor"], dtype="int4")
    x = tensor()
    fq(x)
    state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in fq.state_dict().items()}
    fq.load_state_dict(state, assign=True)
    scale = fq.calculate_qparams()[0].clone()
    for parameter in fq.parameters():
        parameter.data.mul_(2)
    assert torch.equal(fq.calculate_qparams()[0], 2 * scale)


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus", "pact"])
@pytest.mark.parametrize("finder", ["minmax", "mse"])
def test_tensors_of_any_rank_share_a_step(kind, finder):
    """A step for whole tensors counts a matrix and a tensor of three dimensions alike, and keeps its shape."""
    spec = {"dtype": "uint4", "qscheme": "asymmetric", "range_calculator_cls": finder}
    mixed, flat = (make(kind, "activation", **spec).eval() for _ in range(2))
    for fq in (mixed, flat):
        fq(tensor(9) * 50)
        fq.reset_statistics()
    shape = mixed.calculate_qparams()[0].shape
    for seed in range(4):
        x = tensor(seed) * (1 + seed)
        flat(x)
        mixed(x.reshape(2, 3, 32) if seed % 2 == 0 else x)
    for one, other in zip(mixed.calculate_qparams(), flat.calculate_qparams(), strict=True):
        assert one.shape == shape
        assert torch.equal(one, other)


@pytest.mark.parametrize("finder", ["minmax", "mse", "percentile", "histogram"])
def test_shards_equal_the_whole(finder):
    """Merging calculators of shards gives the initial values of one that saw everything."""
    for kind in ("lsq", "lsq_plus", "pact"):
        spec = {"dtype": "uint4", "qscheme": "asymmetric", "range_calculator_cls": finder}
        whole, left, right = (make(kind, "activation", **spec).eval() for _ in range(3))
        for seed in range(4):
            whole(tensor(seed) * (1 + seed))
            (left if seed % 2 else right)(tensor(seed) * (1 + seed))
        left.qparams_calculator.merge(right.qparams_calculator)
        for a, b in zip(left.calculate_qparams(), whole.calculate_qparams(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("finder", ["mse", "percentile", "histogram"])
def test_restarting_forgets_what_was_seen_before(finder):
    """Example inputs of ``prepare``, which come before a restart, leave no trace in a searched range."""
    restarted, new = (make("lsq_plus", "activation", dtype="int4", range_calculator_cls=finder).eval() for _ in "ab")
    restarted(tensor(7) * 10)
    restarted.reset_statistics()
    for fq in (restarted, new):
        fq(tensor())
        fq(tensor(1))
    for mine, theirs in zip(restarted.calculate_qparams(), new.calculate_qparams(), strict=True):
        assert torch.equal(mine, theirs)


def config(kind_weight="lsq", kind_activation="lsq"):
    weight = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=0), fake_quantize_cls=kind_weight)
    activation = QuantizationSpec(dtype="int8", qparam_calculator_cls=kind_activation)
    return QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={"*": activation}, op_output_spec=None, op_state_spec={"weight": weight}
        ),
        execution_mode="eager",
    )


def test_optimizers_see_the_steps_after_prepare_and_export_freezes_them():
    """Steps are parameters of the prepared model, stay the same objects, learn, survive copies, and then freeze."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    quantizer = Quantizer(model, config())
    prepared = quantizer.prepare((tensor(0, (8, 16)),))
    names = [name for name, _ in prepared.named_parameters() if name.endswith("qparams_calculator.scale")]
    assert len(names) == 4
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    x, y = tensor(1, (64, 16)), tensor(2, (64, 4))
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(x)
    start = {name: p.detach().clone() for name, p in prepared.named_parameters() if name in names}
    losses = []
    with quantizer.training_mode():
        for _ in range(30):
            optimizer.zero_grad()
            loss = (prepared(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    moved = {name: p for name, p in prepared.named_parameters() if name in names}
    assert all(not torch.equal(moved[name], start[name]) for name in names)
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(prepared)(x), prepared(x))
    fresh = Quantizer(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), config())
    loaded = fresh.prepare((tensor(3, (8, 16)),)).eval()
    loaded.load_state_dict(prepared.state_dict())
    assert torch.equal(loaded(x), prepared.eval()(x))
    for module in prepared.modules():
        if hasattr(module, "set_export_mode") and hasattr(module, "qparams_calculator"):
            module.set_export_mode()
    assert all(not p.requires_grad for name, p in prepared.named_parameters() if name in names)


def test_half_precision_models_keep_float32_steps():
    """`model.bfloat16()` must not round the steps."""
    fq = make("lsq", "weight", dtype="int4")
    fq(tensor())
    before = fq.qparams_calculator.scale.detach().clone()
    fq.bfloat16()
    assert fq.qparams_calculator.scale.dtype == torch.float32
    assert torch.equal(fq.qparams_calculator.scale, before)
    x = tensor(1).bfloat16().requires_grad_()
    y = fq(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert fq.qparams_calculator.scale.grad.isfinite().all()


def test_float_formats_are_refused():
    """LSQ is about integer grids."""
    with pytest.raises(ValueError, match="integer grid"):
        make("lsq", "weight", dtype="float8_e4m3fn")


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus"])
@pytest.mark.parametrize("dtype", ["int8", "uint4"])
@pytest.mark.parametrize("qscheme", ["symmetric", "asymmetric"])
def test_a_tensor_of_zeros_leaves_the_step_open(kind, dtype, qscheme):
    """A new LoRA adapter puts out zeros; the step begins with the first tensor that says something, and then stays."""
    for target in ("weight", "activation"):
        fq = make(kind, target, dtype=dtype, qscheme=qscheme)
        x = torch.zeros(4, 8).requires_grad_()
        y = fq(x)
        y.sum().backward()
        assert torch.equal(y, torch.zeros(4, 8))
        assert torch.equal(x.grad, torch.ones(4, 8))
        fq(tensor())
        fresh = make(kind, target, dtype=dtype, qscheme=qscheme)
        fresh(tensor())
        step = fq.qparams_calculator.scale.clone()
        assert torch.equal(step, fresh.qparams_calculator.scale)
        fq(tensor(1) * 50)
        assert torch.equal(fq.qparams_calculator.scale, step)


def test_a_step_that_overshot_zero_counts_by_its_size():
    """A negative step quantizes and learns as the positive one, with the opposite gradient."""
    one, other = make("lsq", dtype="int4"), make("lsq", dtype="int4")
    for fq in (one, other):
        fq(tensor())
    with torch.no_grad():
        other.qparams_calculator.scale.neg_()
    assert other.check_health() == []
    weight = tensor(2)
    outputs = [fq(tensor(1)) for fq in (one, other)]
    for y in outputs:
        (y * weight).sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(one.qparams_calculator.scale.grad, -other.qparams_calculator.scale.grad)
    alphas = [make("pact", "activation", dtype="uint4", qscheme="asymmetric") for _ in range(2)]
    for fq in alphas:
        fq(tensor())
    with torch.no_grad():
        alphas[1].qparams_calculator.alpha.neg_()
    x = tensor(1) * 3
    outputs = [fq(x) for fq in alphas]
    for y in outputs:
        (y * weight).sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(alphas[0].qparams_calculator.alpha.grad, -alphas[1].qparams_calculator.alpha.grad)


def test_a_model_whose_step_overshot_zero_is_exported():
    """The artifact stores the step that is computed with."""
    torch.manual_seed(0)
    quantizer = Quantizer(nn.Sequential(nn.Linear(16, 4)), config(kind_activation="lsq"))
    prepared = quantizer.prepare((tensor(0, (8, 16)),))
    before = Artifact.from_model(prepared)
    with torch.no_grad():
        for module in prepared.modules():
            if type(module).__name__ == "LSQQParamsCalculator":
                module.scale.neg_()
    after = Artifact.from_model(prepared)
    assert after.activations
    for name, activation in after.activations.items():
        assert torch.equal(activation.parts["scale"], before.activations[name].parts["scale"])


def test_parameter_groups_give_every_range_a_rate_of_its_own():
    """Rates are shares of the steps, offsets get four times that, every parameter that trains is in one group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    quantizer = Quantizer(model, config(kind_activation="lsq_plus"))
    prepared = quantizer.prepare((tensor(0, (8, 16)),))
    prepared[0].bias.requires_grad_(False)
    groups = parameter_groups(prepared, 1e-3, range_lr=0.02, weight_decay=0.1)
    assert groups[0]["lr"] == 1e-3
    assert groups[0]["weight_decay"] == 0.1
    grouped = [parameter for group in groups for parameter in group["params"]]
    wanted = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
    assert {id(p) for p in grouped} == {id(p) for p in wanted}
    assert len(grouped) == len(wanted)
    rates = {id(group["params"][0]): group["lr"] for group in groups[1:]}
    for name, module in prepared.named_modules():
        if hasattr(module, "qparams_calculator"):
            scale = module.qparams_calculator.scale
            assert rates[id(scale)] == pytest.approx(0.02 * scale.mean().item()), name
            if hasattr(module.qparams_calculator, "offset"):
                assert rates[id(module.qparams_calculator.offset)] == pytest.approx(0.08 * scale.mean().item())
    torch.optim.Adam(groups)
    with pytest.raises(ValueError, match="range_lr=-1"):
        parameter_groups(prepared, 1e-3, range_lr=-1)


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus"])
def test_results_may_be_changed_in_place(kind):
    """What stands behind a simulator may write into its result, as residual connections do."""
    spec = QuantizationSpec(dtype="int4", fake_quantize_cls=kind)
    gradients = []
    for in_place in (False, True):
        fq = QuantizationComponentFactory.create_fake_quantizer(spec, "activation")
        x = torch.linspace(-1, 2, 24).reshape(4, 6).requires_grad_()
        y = fq(x)
        y = y.add_(1) if in_place else y + 1
        (y * torch.arange(24.0).reshape(4, 6)).sum().backward()
        gradients.append([x.grad, *(p.grad for p in fq.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("mode", "kind", "where"),
    each_pair(
        ["eager", "graph"],
        ["lsq", "lsq_plus", "pact"],
        ["prepare", "calibration", "validation"],
    ),
)
def test_a_forward_in_inference_mode_leaves_training_possible(mode, kind, where):
    """What a range is computed from in inference mode is saved by the backward of later steps."""

    def without_gradients(place):
        return torch.inference_mode() if place == where else torch.no_grad()

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), tensor(shape=(8, 16))
    settings = config("lsq" if kind == "pact" else kind, kind).model_copy(update={"execution_mode": mode})
    quantizer = Quantizer(model, settings)
    with without_gradients("prepare"):
        prepared = quantizer.prepare((x,))
    with quantizer.calibration_mode(), without_gradients("calibration"):
        prepared(x)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    with quantizer.training_mode():
        for _ in range(2):
            prepared(x).square().mean().backward()
            optimizer.step()
            with quantizer.evaluating(), without_gradients("validation"):
                prepared(x)
    learned = [p for name, p in prepared.named_parameters() if name.endswith((".scale", ".alpha"))]
    assert len(learned) == 4
    assert all(p.grad is not None for p in learned)


def test_clipping_of_pact_does_not_depend_on_the_number_of_bits():
    """Changing the bits to and fro changes the step alone."""
    fq = make("pact", "activation", dtype="uint4").eval()
    fq(torch.linspace(0, 4, 100))
    calculator = fq.qparams_calculator
    for dtype, levels in ((torch.uint8, 255), (torch.uint4, 15), (torch.uint6, 63)):
        set_dtype(fq, dtype)
        assert calculator.alpha.item() == 4
        torch.testing.assert_close(calculator.get_qparams()[0], torch.tensor([4 / levels]))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_validation_forward_leaves_trained_parameters_alone(mode):
    """Plain eval in training mode observes nothing once training has moved the steps; a new calibration does."""
    torch.manual_seed(0)
    quantizer = Quantizer(nn.Sequential(nn.Linear(8, 8)), QuantizerConfig.presets.w2a4(execution_mode=mode))
    prepared = quantizer.prepare((tensor(0, (4, 8)),))
    with quantizer.calibration_mode():
        prepared(tensor(1, (4, 8)))
    with quantizer.training_mode():
        steps = [value for name, value in prepared.named_parameters() if name.endswith("scale")]
        optimizer = torch.optim.SGD(steps, lr=0.01)
        prepared(tensor(2, (4, 8))).square().sum().backward()
        optimizer.step()
        trained = copy.deepcopy(steps)
        for model in (prepared, copy.deepcopy(prepared)):
            model.eval()(tensor(3, (4, 8)))
            found = [value for name, value in model.named_parameters() if name.endswith("scale")]
            assert len(found) == len(trained) > 0
            assert all(torch.equal(one, other) for one, other in zip(found, trained, strict=True))
    with quantizer.calibration_mode():
        prepared(tensor(4, (4, 8)))
    assert not any(torch.equal(one, other) for one, other in zip(steps, trained, strict=True))


@pytest.mark.parametrize("given", ["default", "static", "moving_average", "global_minmax"])
def test_a_searched_range_is_that_of_all_calibration_batches(given):
    """Also where the calculator that the learned one replaces asks for the ranges of single tensors."""
    spec = {"range_calculator_cls": "mse", "qparam_calculator_cls": given}
    fq = make("lsq_plus", "activation", **spec).eval()
    for reach in (8.0, 1.0):
        fq(torch.linspace(-reach, reach, 1000))
    assert fq.qparams_calculator.scale.item() > 7.5 / 127.5


@pytest.mark.parametrize("finder", ["minmax", "mse"])
def test_an_unused_learned_calculator_is_neutral_in_merging(finder):
    def seen(*seeds):
        fq = make("lsq_plus", "activation", range_calculator_cls=finder).eval()
        for seed in seeds:
            fq(tensor(seed) * (8 if seed == 0 else 1))
        return fq.qparams_calculator

    into = seen()
    into.merge(seen(0))
    into.merge(seen(1))
    direct = seen(0)
    direct.merge(seen(1))
    for one, other in zip(into.get_qparams(), direct.get_qparams(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bounds", [[-1.0, 1.0], [-1.0, None], [None, 1.0]])
def test_the_step_of_lsq_begins_in_a_fixed_range(bounds):
    """The larger of the fixed end and what is measured at the other one, as with a static calculator."""
    learned = make("lsq", "activation", float_range=bounds).eval()
    plain = make("default", "activation", float_range=bounds)
    for fq in (learned, plain):
        fq(tensor())
    torch.testing.assert_close(learned.calculate_qparams()[0], plain.calculate_qparams()[0])


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus", "pact"])
def test_a_module_that_is_called_twice_while_observing_runs_backward(kind):
    """The second call finds the parameters anew, and the gradient of the first one is that of its own."""
    fq = make(kind, "activation", dtype="uint4", qscheme="asymmetric").eval()
    z = tensor(0, (4, 8)).requires_grad_()
    (fq(z) + fq(2 * z)).sum().backward()
    assert z.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in fq.parameters())


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus", "pact"])
@pytest.mark.parametrize("training", [True, False])
def test_a_state_without_parameters_has_them_found_anew(kind, training):
    fq = make(kind, "activation", dtype="uint4", qscheme="asymmetric").train(training)
    fresh, state = copy.deepcopy(fq), copy.deepcopy(fq.state_dict())
    for seed in range(2):
        fq(tensor(seed) * 10)
    fq.load_state_dict(state)
    assert torch.equal(fq(tensor(3)), fresh(tensor(3)))


def test_assigned_states_of_half_precision_become_float32():
    fq = make("lsq_plus", "activation").eval()
    fq(tensor())
    state = {name: value.half() if value.is_floating_point() else value for name, value in fq.state_dict().items()}
    fq.load_state_dict(state, assign=True)
    assert {p.dtype for p in fq.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in fq.parameters())
    assert state["qparams_calculator.scale"].dtype == torch.float16
