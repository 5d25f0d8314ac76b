"""The palettizer: which weights it touches, its life cycle, and what survives saving, copying and exporting."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from bitwright import ExportBackend
from bitwright.common import CoreMLExportError
from bitwright.errors import ConfigMatchWarning, PlanError
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.config import OpKMeansPalettizerConfig
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.quantization.spec import QuantizationSpec

from .networks import ConvLinear, Tokens, config_of, image, palettized, simulators


def simulator_of(module: nn.Module, name: str = "weight"):
    return module.parametrizations[name][0]


def test_prepare_works_in_place():
    """Weights have at most 16 values, biases stay, state and modes are untouched."""
    model = ConvLinear().train()
    norm = copy.deepcopy(model.norm.state_dict())
    palettizer = KMeansPalettizer(model)
    assert palettizer.prepare(image()) is model
    assert palettizer._is_model_prepared(model)
    assert model.training
    assert all(torch.equal(norm[key], value) for key, value in model.norm.state_dict().items())
    assert len(model.conv.weight.unique()) == len(model.linear.weight.unique()) == 16
    assert not is_parametrized(model.conv, "bias")


def test_order_of_calls():
    """Twice is an error; so are finalize, training and calibration without prepare."""
    model = ConvLinear()
    palettizer = KMeansPalettizer(model)
    with pytest.raises(RuntimeError, match="must be prepared"):
        palettizer.finalize()
    with pytest.raises(RuntimeError, match="must be prepared before entering training mode"):
        palettizer.training_mode().__enter__()
    with pytest.raises(RuntimeError, match="must be prepared before entering calibration mode"):
        palettizer.calibration_mode(loss_fn=F.mse_loss).__enter__()
    with pytest.raises(RuntimeError, match="must be prepared"):
        palettizer.save_sensitivities("nowhere")
    palettizer.prepare(image())
    with pytest.raises(RuntimeError, match="already been prepared"):
        palettizer.prepare(image())
    with pytest.raises(RuntimeError, match="inside a training_mode"):
        palettizer.step()
    assert palettizer.finalize(backend="_torch") is model
    assert is_parametrized(model.conv, "weight")


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_number_of_workers_is_checked(workers):
    """Before anything else."""
    with pytest.raises(ValueError, match="num_workers must be >= 1"):
        KMeansPalettizer(ConvLinear()).prepare(image(), num_workers=workers)


def test_results_do_not_depend_on_workers_threads_or_seeds():
    """Vectors too: they have a seed of their own."""
    spec = PalettizationSpec(n_bits=3, cluster_dim=2, granularity=PerGroupedChannelGranularity(axis=0, group_size=2))
    torch.manual_seed(0)
    model, threads = ConvLinear(), torch.get_num_threads()
    states = []
    try:
        for workers, seed in ((1, 0), (2, 1)):
            torch.set_num_threads(workers)
            torch.manual_seed(seed)
            clone = copy.deepcopy(model)
            KMeansPalettizer(clone, config_of(spec)).prepare(image(), num_workers=workers)
            states.append(clone.state_dict())
            assert torch.initial_seed() == seed
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_levels_of_the_config():
    """op_name beats op_type beats the module's own; module_state_spec beats all; None is off."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    two, one = PalettizationSpec(n_bits=2), PalettizationSpec(n_bits=1)
    config = KMeansPalettizerConfig(
        global_config=ModuleKMeansPalettizerConfig(
            op_type_config={"linear": OpKMeansPalettizerConfig(op_state_spec={"weight": two})},
            op_name_config={r"1\.linear": OpKMeansPalettizerConfig(op_state_spec={"weight": one})},
        ),
        module_name_configs={"2": None, "3": ModuleKMeansPalettizerConfig(module_state_spec={"weight": one})},
    )
    KMeansPalettizer(model, config).prepare((torch.randn(2, 8),))
    assert [len(layer.weight.unique()) for layer in model] == [4, 2, 64, 2]


def test_a_wildcard_with_an_exception():
    """``"*"`` palettizes every state, a key with None leaves one out; biases of all ranks work."""
    model = ConvLinear()
    spec = PalettizationSpec(n_bits=2)
    config = KMeansPalettizerConfig(
        global_config=ModuleKMeansPalettizerConfig(op_state_spec={"*": spec}),
        module_name_configs={"linear": ModuleKMeansPalettizerConfig(op_state_spec={"*": spec, "bias": None})},
    )
    KMeansPalettizer(model, config).prepare(image())
    assert len(model.conv.bias.unique()) == 4
    assert not is_parametrized(model.linear, "bias")
    assert is_parametrized(model.linear, "weight")


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"granularity": PerGroupedChannelGranularity(axis=0, group_size=16)}, "group-size"),
        ({"granularity": PerGroupedChannelGranularity(axis=0, group_size=8), "cluster_dim": 4}, "group-size"),
        ({"cluster_dim": 4}, "cluster-dim"),
    ],
)
def test_sizes_that_do_not_divide_leave_the_weight_dense(spec, code, caplog):
    """A warning that names the weight, a log record, and with strict an error; other weights are palettized."""
    config = config_of(PalettizationSpec(**spec))
    with pytest.raises(PlanError, match=rf"\[{code}\] linear\.weight"):
        KMeansPalettizer(ConvLinear(), config).prepare(image(), strict=True)
    model = ConvLinear()
    with caplog.at_level(logging.WARNING), pytest.warns(ConfigMatchWarning, match=code):
        KMeansPalettizer(model, config).prepare(image())
    assert "Skipping palettization of 'linear.weight'" in caplog.text
    assert not is_parametrized(model.linear)
    assert is_parametrized(model.conv, "weight")


def test_weights_that_are_not_finite_stop_everything():
    """All of them are named, and the model is as it was."""
    model = ConvLinear()
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = float("nan")
        model.linear.weight[0, 0] = float("inf")
    with pytest.raises(PlanError, match=r"2 problem(.|\n)*conv\.weight(.|\n)*linear\.weight"):
        KMeansPalettizer(model).prepare(image())
    assert not is_parametrized(model.conv)
    assert not KMeansPalettizer._is_model_prepared(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantized_palettes_beyond_float32_name_the_weight_and_the_remedy(dtype):
    """The largest entry, rounded away from zero, is infinite: in float64, too, scales are of float32."""
    model = nn.Sequential(nn.Linear(4, 1)).to(dtype)
    largest = torch.finfo(torch.float32).max
    model[0].weight.data = torch.tensor([[-largest, largest, -largest, largest]], dtype=dtype)
    table = QuantizationSpec(dtype="int8")
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*reach 3\.403e\+38 overflow.*Scale.*lut_qspec"):
        palettized(model, (torch.ones(1, 4, dtype=dtype),), n_bits=1, lut_qspec=table)
    assert not is_parametrized(model[0])


def test_a_constant_weight_is_exact_and_a_named_warning():
    """One entry of the palette is all it takes."""
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 0.1)
    with pytest.warns(ConfigMatchWarning, match=r"constant-weight.*0\.weight"):
        KMeansPalettizer(model).prepare((torch.randn(1, 4),))
    assert model[0].weight.unique().tolist() == [pytest.approx(0.1)]


def test_groups_follow_the_output_axis_of_the_op():
    """With the axis left open: 0 for convolution and linear, 1 for transposed convolution."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 4, 2))
    spec = {"n_bits": 2, "granularity": PerGroupedChannelGranularity(group_size=2)}
    palettized(model, (torch.randn(1, 3, 4, 4),), **spec)
    assert simulator_of(model[0]).lut.shape == (4, 1, 4, 1)
    assert simulator_of(model[1]).lut.shape == (1, 2, 4, 1)
    plan = KMeansPalettizer(nn.Sequential(nn.ConvTranspose2d(8, 4, 2)), config_of(PalettizationSpec(**spec))).plan(
        (torch.randn(1, 8, 4, 4),)
    )
    assert plan.rows[0].block_size == (8, 2, 2, 2)


@pytest.mark.parametrize("layer", [nn.Linear(8, 4), nn.Conv2d(8, 4, 1), nn.Conv1d(8, 4, 3)])
def test_a_palette_for_each_input_channel(layer):
    """Every group has as many entries as it may, and the layer runs."""
    spec = PalettizationSpec(n_bits=1, granularity={"type": "per_grouped_channel", "axis": 1, "group_size": 1})
    model = nn.Sequential(layer)
    x = torch.randn(2, 8, *[5] * (layer.weight.dim() - 2))
    KMeansPalettizer(model, config_of(spec)).prepare((x,))
    assert model(x).shape[1] == 4
    assert all(len(channel.unique()) == 2 for channel in model[0].weight.unbind(1))


def test_channel_scales_follow_the_output_axis_of_the_op():
    """The peak over all other dimensions."""
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 2))
    dense = model[0].weight.detach().clone()
    palettized(model, (torch.randn(1, 8, 4, 4),), enable_per_channel_scale=True)
    assert torch.equal(simulator_of(model[0]).per_channel_scale, dense.abs().amax((0, 2, 3)).view(1, 4))


def test_a_weight_without_an_axis_is_an_error_of_the_plan():
    """An op that is not known gives none."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ self.matrix

    spec = PalettizationSpec(granularity=PerGroupedChannelGranularity(group_size=2))
    config = KMeansPalettizerConfig(
        module_name_configs={"": ModuleKMeansPalettizerConfig(module_state_spec={"matrix": spec})}
    )
    with pytest.raises(PlanError, match=r"\[axis-unresolved\] matrix"):
        KMeansPalettizer(Product(), config).prepare((torch.randn(2, 4),))
    model = Product()
    spec = PalettizationSpec(n_bits=2)
    config = KMeansPalettizerConfig(
        module_name_configs={"": ModuleKMeansPalettizerConfig(module_state_spec={"matrix": spec})}
    )
    KMeansPalettizer(model, config).prepare((torch.randn(2, 4),))
    assert len(model.matrix.unique()) == 4


def test_embeddings_rnns_attention_and_tied_weights():
    """All are found; a tied weight has one simulator and one index buffer."""
    torch.manual_seed(0)
    model = Tokens().eval()
    tokens = (torch.randint(0, 24, (2, 5)),)
    KMeansPalettizer(model).prepare(tokens)
    assert simulator_of(model.embed) is simulator_of(model.head)
    assert model.embed.parametrizations.weight.original is model.head.parametrizations.weight.original
    for weight in (model.head.weight, model.rnn.weight_ih_l0, model.rnn.weight_hh_l0, model.attention.in_proj_weight):
        assert len(weight.unique()) == 16
    assert len(model.attention.out_proj.weight.unique()) == 16
    assert not is_parametrized(model.rnn, "bias_ih_l0")
    output = model(*tokens)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*tokens), output)
    assert torch.equal(copy.deepcopy(model)(*tokens), output)


@pytest.mark.parametrize(
    ("keys", "joint", "out"),
    [(("in_proj_weight",), True, False), (("weight",), False, True), (("weight", "in_proj_weight"), True, True)],
)
def test_the_two_weights_of_attention_have_their_own_keys(keys, joint, out):
    """``weight`` is the output projection, as in coreai-opt."""
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True))
    spec = dict.fromkeys(keys, PalettizationSpec(n_bits=4))
    config = KMeansPalettizerConfig(
        global_config=None,
        module_type_configs={nn.MultiheadAttention: ModuleKMeansPalettizerConfig(op_state_spec=spec)},
    )
    KMeansPalettizer(model, config).prepare((torch.randn(1, 3, 16),))
    attention = model[0].self_attn
    assert (is_parametrized(attention, "in_proj_weight"), is_parametrized(attention.out_proj, "weight")) == (joint, out)


def test_a_checkpoint_loads_into_a_freshly_prepared_model():
    """Whose weights were others; also through a file, with tensors only."""
    torch.manual_seed(0)
    first, second = ConvLinear().eval(), ConvLinear().eval()
    spec = {"lut_qspec": QuantizationSpec(dtype="int8"), "enable_per_channel_scale": True}
    for model in (first, second):
        palettized(model, image(), **spec)
    assert not torch.equal(first(*image()), second(*image()))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(*image()), second(*image()))


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"n_bits": 4}, {"n_bits": 2}),
        ({"cluster_dim": 2}, {}),
        ({"granularity": PerGroupedChannelGranularity(axis=0, group_size=2)}, {}),
    ],
)
def test_a_checkpoint_of_other_palettes_is_refused(saved, own):
    """Naming each weight, both kinds of palettes and the remedy; the model goes on with its own."""
    torch.manual_seed(0)
    first, second = ConvLinear().eval(), ConvLinear().eval()
    for model, spec in ((first, saved), (second, own)):
        KMeansPalettizer(model, config_of(PalettizationSpec(**spec))).prepare(image())
    before = {name: entry.clone() for name, entry in second.state_dict().items() if name.endswith("centroids")}
    with pytest.raises(RuntimeError, match=r"conv\.weight: the checkpoint has palettes.*Prepare it with the spec"):
        second.load_state_dict(first.state_dict())
    state = second.state_dict()
    assert all(torch.equal(state[name], entry) for name, entry in before.items())
    assert second(*image()).isfinite().all()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(copier):
    """And finalizing one leaves the other alone."""
    model = ConvLinear().eval()
    palettizer = palettized(model, image())
    clone = copier(model)
    output = model(*image())
    assert torch.equal(clone(*image()), output)
    palettizer.finalize(clone, backend=ExportBackend.CoreML)
    assert torch.equal(model(*image()), output)
    assert is_parametrized(model.conv)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"n_bits": 5},
        {"granularity": PerGroupedChannelGranularity(axis=0, group_size=2)},
        {"cluster_dim": 2},
        {"enable_per_channel_scale": True},
        {"lut_qspec": QuantizationSpec(dtype="uint8", qscheme="asymmetric")},
    ],
)
def test_finalize_for_core_ml_keeps_the_outputs(spec):
    """Bit for bit; the marker goes, so that another compressor may follow."""
    model = ConvLinear().eval()
    palettizer = palettized(model, image(), **spec)
    output = model(*image())
    finalized = palettizer.finalize(backend="coreml")
    assert torch.equal(finalized(*image()), output)
    assert not palettizer._is_model_prepared(finalized)
    assert not is_parametrized(finalized.conv)


def test_finalize_checks_before_it_changes():
    """What Core ML cannot hold is an error, and the model stays prepared."""
    model = ConvLinear().eval()
    palettizer = palettized(model, image(), cluster_dim=2, enable_per_channel_scale=True)
    with pytest.raises(CoreMLExportError):
        palettizer.finalize(backend="coreml")
    assert palettizer._is_model_prepared(model)
    with pytest.raises(ValueError, match="mmap_dir is only supported"):
        palettizer.finalize(backend="coreml", mmap_dir="anywhere")


def test_compressing_a_finalized_weight_again_is_an_error():
    """Its dense values are gone; coreai-opt does nothing there, in silence."""
    model = ConvLinear().eval()
    palettizer = palettized(model, image())
    palettizer.finalize(backend=ExportBackend._TORCH)
    for module in (model.conv, model.linear):
        weight = module.weight.detach().clone()
        module.parametrizations.weight[0] = Frozen(weight)
        module.parametrizations.weight.original = nn.Parameter(torch.empty(0))
    with pytest.raises(PlanError, match=r"\[order\] conv\.weight.*finalized"):
        KMeansPalettizer(model).prepare(image())


class Frozen(nn.Module):
    """As an exporter leaves it: computes the weight from what it holds."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, placeholder: torch.Tensor) -> torch.Tensor:
        return self.weight * 1.0


def test_the_plan_says_what_will_be_stored():
    """Indices in n bits, tables in the weight's dtype or in their own, scales; nothing is changed."""
    model = ConvLinear()
    rows = {row.tensor: row for row in KMeansPalettizer(model).plan(image())}
    assert not is_parametrized(model.conv)
    assert rows["conv.weight"].compressed_bytes == 32 * 27 // 2 + 16 * 4
    spec = PalettizationSpec(
        n_bits=3,
        lut_qspec=QuantizationSpec(dtype="int8"),
        granularity=PerGroupedChannelGranularity(axis=0, group_size=8),
        enable_per_channel_scale=True,
    )
    row = next(iter(KMeansPalettizer(model, config_of(spec)).plan(image())))
    assert row.compressed_bytes == 32 * 27 * 3 // 8 + 4 * 8 + (4 + 32) * 4
    asymmetric = spec.model_copy(update={"lut_qspec": QuantizationSpec(dtype="uint8", qscheme="asymmetric")})
    other = next(iter(KMeansPalettizer(model, config_of(asymmetric)).plan(image())))
    assert other.compressed_bytes == row.compressed_bytes + 4  # a zero point for each table
    assert row.spec.describe() == "3 bit palette per_grouped_channel(0, 8) channel scale int8 entries"


def test_the_resolver_names_the_ops():
    """For inspection: function to ``op_type_config`` key."""
    resolve = KMeansPalettizer.get_op_type_resolver()
    assert resolve(F.linear) == "linear"
    assert resolve(F.multi_head_attention_forward) == "multi_head_attention_forward"
    assert resolve(torch.relu) is None


def test_keyword_inputs_and_errors_of_the_model():
    """A forward that fails is named with its module."""
    model = ConvLinear()
    KMeansPalettizer(model).prepare(example_kwargs={"x": image()[0]})
    assert is_parametrized(model.conv)
    with pytest.raises(RuntimeError, match="'conv'"):
        KMeansPalettizer(ConvLinear()).prepare((torch.randn(1, 4, 8, 8),))
    with pytest.raises(TypeError, match="tuple"):
        KMeansPalettizer(ConvLinear()).prepare(image()[0])
    with pytest.raises(TypeError, match="KMeansPalettizerConfig"):
        KMeansPalettizer(ConvLinear(), PalettizationSpec())


def test_nothing_to_palettize():
    """A config that is off prepares and finalizes a model without a change."""
    model = ConvLinear()
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=None))
    palettizer.prepare(image(), num_workers=2)
    assert simulators(model) == []
    palettizer.finalize(backend="_torch")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    """Tables and outputs are in the model's dtype."""
    model = nn.Sequential(nn.Linear(16, 16)).to(dtype)
    palettized(model, (torch.randn(2, 16, dtype=dtype),), lut_qspec=QuantizationSpec(dtype="int8"))
    assert model[0].weight.dtype == simulator_of(model[0]).lut.dtype == dtype
    assert len(model[0].weight.unique()) <= 16


def test_export_and_compile_see_a_plain_look_up():
    """No switch is read from a buffer there, and the outputs are the same."""
    model = ConvLinear().eval()
    palettized(model, image(), lut_qspec=QuantizationSpec(dtype="int8"))
    output = model(*image())
    exported = torch.export.export(model, image())
    assert torch.equal(exported.module()(*image()), output)
    assert torch.equal(torch.compile(model, backend="eager")(*image()), output)


def test_a_captured_graph():
    """The graph front end's module: weights are found through its graph, and copies and pickles work."""
    from bitwright.program.graph import capture_graph

    model = ConvLinear().eval()
    graph, _ = capture_graph(model, image())
    plan = KMeansPalettizer(graph).plan()
    assert (plan.mode, [row.tensor for row in plan]) == ("graph", ["conv.weight", "linear.weight"])
    KMeansPalettizer(graph).prepare()
    eager = copy.deepcopy(model)
    KMeansPalettizer(eager).prepare(image())
    assert torch.equal(graph(*image()), eager(*image()))
    assert torch.equal(copy.deepcopy(graph)(*image()), graph(*image()))
    assert torch.equal(pickle.loads(pickle.dumps(graph))(*image()), graph(*image()))


def test_an_exported_graph_module():
    """Its weights are those of its submodules; the graph reads them through the simulators."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    example = (torch.randn(3, 8),)
    eager = copy.deepcopy(model)
    KMeansPalettizer(eager).prepare(example)
    graph = torch.export.export(model, example).module()
    KMeansPalettizer(graph).prepare(example)
    assert len(simulators(graph)) == 2
    assert torch.equal(graph(*example), eager(*example))


def test_an_exported_graph_is_calibrated_and_trained():
    """As in eager mode, though the modules of ``torch.export`` refuse ``train()`` and ``eval()``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    data, target = torch.randn(8, 16), torch.randn(8, 4)
    graph = torch.export.export(copy.deepcopy(model), (data,)).module()  # which shares its parameters
    spec = config_of(PalettizationSpec(n_bits=2, training_strategy_spec={"type": "dkm"}))
    for subject in (model, graph):
        palettizer = KMeansPalettizer(subject, spec)
        palettizer.prepare((data,))
        with palettizer.calibration_mode(loss_fn=nn.functional.mse_loss) as helper:
            helper.step(subject(data), target)
        calibrated = subject(data)
        optimizer = torch.optim.SGD(subject.parameters(), lr=0.1)
        with palettizer.training_mode():
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.mse_loss(subject(data), target).backward()
                optimizer.step()
                palettizer.step()
        assert not torch.equal(subject(data), calibrated)
        assert len(subject.get_submodule("0").weight.unique()) == 4
    torch.testing.assert_close(graph(data), model(data))
