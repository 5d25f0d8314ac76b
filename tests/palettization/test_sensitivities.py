"""Weighted clustering: statistics of squared gradients, their files, and the life cycle of calibration."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from bitwright.errors import BitwrightWarning
from bitwright.palettization import KMeansPalettizer, PalettizationSpec
from bitwright.palettization.kmeans import SensitivityStatistics

from .networks import ConvLinear, Tokens, config_of, image, palettized, simulators


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def squared_gradients(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Σ over batches of (gradient of the batch's loss)², dense weights, eval mode."""
    sums: dict[str, torch.Tensor] = {}
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.square()
    model.zero_grad()
    return sums


def normalized(total: torch.Tensor) -> torch.Tensor:
    share = total / total.max()
    return torch.where(share > 0, share, share[share > 0].min()).clamp_min(1e-12)


def test_sensitivities_are_squared_gradients_of_the_dense_model():
    """In eval mode, summed over batches, divided by the largest; zeros take the smallest that is not zero."""
    torch.manual_seed(0)
    model = ConvLinear().train()
    expected = squared_gradients(copy.deepcopy(model).eval(), [batch(1), batch(2)])
    palettizer = palettized(model, image())
    norm = copy.deepcopy(model.norm.state_dict())
    with palettizer.calibration_mode(loss_fn=F.cross_entropy) as helper:
        assert not model.training
        for seed in (1, 2):
            x, y = batch(seed)
            helper.step(model(x), y)
    assert model.training
    assert all(torch.equal(norm[key], value) for key, value in model.norm.state_dict().items())
    for module, name in ((model.conv, "conv.weight"), (model.linear, "linear.weight")):
        found = module.parametrizations.weight[0].sensitivities
        assert torch.allclose(found, normalized(expected[name]), rtol=1e-3, atol=1e-6)
        assert float(found.max()) == 1.0


def test_a_small_case_by_hand():
    """grad² = [[1, 4], [0, 0]] becomes [[1/4, 1], [1/4, 1/4]]."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    x = torch.tensor([[1.0, 2.0]])
    palettizer = palettized(model, (x,))
    with palettizer.calibration_mode(loss_fn=lambda output, target: output[:, 0]) as helper:
        helper.step(model(x), None)
    sensitivities = model.parametrizations.weight[0].sensitivities
    assert torch.allclose(sensitivities, torch.tensor([[0.25, 1.0], [0.25, 0.25]]))


def test_weighted_palettes_lose_less():
    """Where important weights are small, the loss rises less with sensitivities than without, over several models."""
    plain_loss = weighted_loss = 0.0
    for seed in range(5):
        torch.manual_seed(seed)
        teacher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        strength = torch.linspace(0.2, 3, 16)
        x = torch.randn(256, 16) * strength
        with torch.no_grad():
            teacher[0].weight /= strength
        target = teacher(x).detach()
        plain, weighted = copy.deepcopy(teacher), copy.deepcopy(teacher)
        palettized(plain, (x,), n_bits=2)
        palettizer = palettized(weighted, (x,), n_bits=2)
        noisy = target + torch.randn_like(target)
        with palettizer.calibration_mode(loss_fn=F.mse_loss) as helper:
            for part in range(0, 256, 2):
                helper.step(weighted(x[part : part + 2]), noisy[part : part + 2])
        plain_loss += F.mse_loss(plain(x), target).item()
        weighted_loss += F.mse_loss(weighted(x), target).item()
    assert weighted_loss < 0.8 * plain_loss


def test_the_mode_is_clean():
    """Dense weights inside, gradients as before afterwards, frozen weights take part, hooks are gone."""
    model = ConvLinear()
    palettizer = palettized(model, image())
    model.conv.parametrizations.weight.original.requires_grad_(False)
    model.linear.bias.grad = torch.ones(10)
    x, y = batch(3)
    with palettizer.calibration_mode(loss_fn=F.cross_entropy) as helper, torch.no_grad():
        assert len(model.conv.weight.unique()) > 16
        with torch.enable_grad():
            helper.step(model(x), y)
        assert model.linear.bias.grad is not None
    assert len(model.conv.weight.unique()) == 16
    assert torch.equal(model.linear.bias.grad, torch.ones(10))
    assert model.conv.parametrizations.weight.original.grad is None
    assert not model.conv.parametrizations.weight.original.requires_grad
    assert model.conv.parametrizations.weight[0].sensitivities is not None


def fail_while_calibrating(palettizer, model):
    with palettizer.calibration_mode(loss_fn=F.cross_entropy) as helper:
        x, y = batch(4)
        helper.step(model(x), y)
        raise ZeroDivisionError


def test_a_block_that_raises_changes_nothing():
    """Palettes, switches and life cycle are as before."""
    model = ConvLinear()
    palettizer = palettized(model, image())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        fail_while_calibrating(palettizer, model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(sim.sensitivities is None and sim.is_on for sim in simulators(model))
    with palettizer.training_mode():
        pass


def test_a_switch_that_was_off_is_off_after_an_error_and_on_after_calibration():
    """An error leaves everything as it was; palettes that were made anew are put to use, as in coreai-opt."""
    model = ConvLinear()
    palettizer = palettized(model, image())
    conv, linear = simulators(model)
    conv.disable_fake_palett()
    with pytest.raises(ZeroDivisionError):
        fail_while_calibrating(palettizer, model)
    assert (conv.is_on, linear.is_on) == (False, True)
    with palettizer.calibration_mode(loss_fn=F.cross_entropy) as helper:
        x, y = batch(4)
        helper.step(model(x), y)
    assert (conv.is_on, linear.is_on) == (True, True)


def test_gradients_that_are_not_finite_are_an_error():
    """It names the parameters; the palettes stay."""
    model = ConvLinear()
    palettizer = palettized(model, image())
    before = model.conv.weight.detach().clone()

    def calibrate():
        with palettizer.calibration_mode(loss_fn=lambda output, target: output.sum() * float("inf")) as helper:
            helper.step(model(*image()), None)

    with pytest.raises(ValueError, match=r"conv\.parametrizations\.weight\.original.*not finite"):
        calibrate()
    assert torch.equal(model.conv.weight, before)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        ("mse", TypeError, "loss_fn must be a function"),
        (lambda output, target: None, TypeError, "must return a tensor, got NoneType"),
        (lambda output, target: output.detach().sum(), RuntimeError, "The loss has no gradient"),
    ],
)
def test_losses_that_are_none(loss_fn, error, message):
    """What is wrong with them is said at the call, and the palettes stay."""
    model = ConvLinear()
    palettizer = palettized(model, image())
    before = model.conv.weight.detach().clone()
    with pytest.raises(error, match=message), palettizer.calibration_mode(loss_fn=loss_fn) as helper:
        helper.step(model(*image()), None)
    assert torch.equal(model.conv.weight, before)


def test_a_folder_that_is_not_there_is_told_before_the_work(tmp_path):
    """Not after a long calibration, whose result would be lost."""
    palettizer = palettized(ConvLinear(), image())
    path = tmp_path / "missing" / "sensitivities.safetensors"
    with (
        pytest.raises(FileNotFoundError, match="folder that does not exist"),
        palettizer.calibration_mode(loss_fn=F.cross_entropy, sensitivity_path=path),
    ):
        pytest.fail("the block must not run")


def test_no_data_and_nesting_are_errors():
    """step() at least once, one mode at a time."""
    model = ConvLinear()
    palettizer = palettized(model, image())
    with (
        pytest.raises(RuntimeError, match=r"at least one call to step\(\)"),
        palettizer.calibration_mode(loss_fn=F.cross_entropy),
    ):
        model(*image())
    with (
        pytest.raises(RuntimeError, match="Cannot enter calibration_mode"),
        palettizer.training_mode(),
        palettizer.calibration_mode(loss_fn=F.cross_entropy),
    ):
        pass


def test_statistics_merge_and_go_through_files(tmp_path):
    """Two halves of the data make the whole, whether in one process or by way of a file."""
    parts = [SensitivityStatistics(), SensitivityStatistics()]
    whole = SensitivityStatistics()
    for seed in range(4):
        gradient = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
        whole.add([("w", gradient)])
        parts[seed % 2].add([("w", gradient)])
    parts[1].save(tmp_path / "part.safetensors")
    parts[0].merge(SensitivityStatistics.load(tmp_path / "part.safetensors"))
    assert parts[0].steps == whole.steps == 4
    assert torch.allclose(parts[0].sums["w"], whole.sums["w"])
    other = SensitivityStatistics()
    other.add([("w", torch.ones(2))])
    with pytest.raises(ValueError, match=r"'w' has shape .* merge statistics of one model only"):
        whole.merge(other)


def test_sparse_gradients_are_those_of_the_dense_embedding():
    """Rows that several tokens use count once, with the square of the sum."""
    torch.manual_seed(0)
    dense, tokens = nn.Embedding(24, 16), torch.tensor([[1, 2, 1], [3, 1, 2]])
    sparse = nn.Embedding(24, 16, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    found = []
    for model in (dense, sparse):
        palettizer = palettized(model, (tokens,))
        with palettizer.calibration_mode(loss_fn=lambda output, target: output.square().sum()) as helper:
            for part in tokens:
                helper.step(model(part), None)
        found.append(model.parametrizations.weight[0].sensitivities)
    assert torch.equal(*found)


def test_sums_near_the_end_of_the_range_stay_finite():
    """They are parts of the largest like others; what is far from the end has the same digits as ever."""
    statistics = SensitivityStatistics()
    statistics.sums = {"large": torch.tensor([3e38, 1e38, 3e30]), "usual": torch.tensor([3.0, 0.7, 1e-6])}
    found = statistics.sensitivities()
    torch.testing.assert_close(found["large"], torch.tensor([1.0, 1 / 3, 1e-8]))
    usual = statistics.sums["usual"] * 100
    assert torch.equal(found["usual"], usual / usual.max())


def test_a_gradient_of_zeros_makes_all_entries_equal():
    """A weight that the loss does not depend on is clustered without weights."""
    statistics = SensitivityStatistics()
    statistics.add([("w", torch.zeros(2, 2))])
    assert torch.equal(statistics.sensitivities()["w"], torch.ones(2, 2))


@pytest.mark.parametrize("name", ["s.safetensors", "s.pt", "s.dat"])
def test_files_of_sensitivities(tmp_path, name):
    """safetensors, or the format of torch.save with its suffix; all parameters are in it; a fresh model takes them."""
    torch.manual_seed(0)
    model, fresh = ConvLinear(), ConvLinear()
    fresh.load_state_dict(model.state_dict())
    path = tmp_path / name
    palettizer = palettized(model, image(), n_bits=3)
    x, y = batch(5)
    with palettizer.calibration_mode(loss_fn=F.cross_entropy, sensitivity_path=str(path)) as helper:
        helper.step(model(x), y)
    stored = torch.load(path, weights_only=True) if name == "s.pt" else load_file(path)
    assert set(stored) == {key for key, _ in model.named_parameters()}
    KMeansPalettizer(fresh, config_of(PalettizationSpec(n_bits=3))).prepare(image(), sensitivity_path=path)
    assert torch.equal(fresh.conv.weight, model.conv.weight)
    plain = ConvLinear()
    plain.load_state_dict({k: v for k, v in fresh.state_dict().items() if "parametr" not in k}, strict=False)
    again = tmp_path / f"again_{name}"
    palettizer.save_sensitivities(again)
    KMeansPalettizer(copy.deepcopy(plain), config_of(PalettizationSpec(n_bits=3))).prepare(image(), again)


def test_a_file_of_torch_save_without_its_suffix_is_recognised(tmp_path):
    """As coreai-opt writes it, whatever the name; it may hold more than is needed."""
    model = ConvLinear()
    entries = {
        "conv.parametrizations.weight.original": torch.rand(32, 3, 3, 3) + 0.1,
        "linear.weight": torch.rand(10, 32) + 0.1,
        "norm.weight": torch.rand(32),
    }
    torch.save(entries, tmp_path / "sensitivities")
    KMeansPalettizer(model).prepare(image(), str(tmp_path / "sensitivities"))
    assert all(sim.sensitivities is not None for sim in simulators(model))


def test_files_that_hold_something_else(tmp_path):
    """Another model's, not tensors, not a known format, not there."""
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text.pt").write_text("hello world")
    (tmp_path / "empty.bin").touch()
    torch.save([1, 2], tmp_path / "list.pt")
    save_file({"conv.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    for name, error, message in (
        ("text", ValueError, "no safetensors file"),
        ("text.pt", ValueError, r"text\.pt' is no file of torch\.save"),
        ("empty.bin", ValueError, r"empty\.bin' is no file of torch\.save"),
        ("list.pt", ValueError, "does not hold sensitivities"),
        ("missing.pt", FileNotFoundError, "missing"),
        ("other.safetensors", ValueError, "belong to another model"),
        ("missing.safetensors", FileNotFoundError, "missing"),
    ):
        model = ConvLinear()
        with pytest.raises(error, match=message):
            KMeansPalettizer(model).prepare(image(), sensitivity_path=tmp_path / name)
        assert simulators(model) == []


def test_missing_sensitivities_are_a_named_warning(tmp_path):
    """The weight is clustered without."""
    save_file({"conv.weight": torch.rand(32, 3, 3, 3)}, tmp_path / "part.safetensors")
    model = ConvLinear()
    with pytest.warns(BitwrightWarning, match=r"No sensitivities for 'linear\.weight'"):
        KMeansPalettizer(model).prepare(image(), sensitivity_path=tmp_path / "part.safetensors")
    assert model.conv.parametrizations.weight[0].sensitivities is not None


def test_saving_without_calibration_is_an_error(tmp_path):
    """There is nothing to save."""
    palettizer = palettized(ConvLinear(), image())
    with pytest.raises(ValueError, match="No sensitivities found"):
        palettizer.save_sensitivities(tmp_path / "s.safetensors")


def test_tied_weights_add_up():
    """Their gradient is that of all uses, stored once."""
    torch.manual_seed(0)
    model = Tokens().eval()
    tokens = torch.randint(0, 24, (2, 5))
    dense = copy.deepcopy(model)
    F.cross_entropy(dense(tokens).flatten(0, 1), tokens.flatten()).backward()
    palettizer = palettized(model, (tokens,))
    with palettizer.calibration_mode(loss_fn=lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())) as helper:
        helper.step(model(tokens), tokens)
    found = model.head.parametrizations.weight[0].sensitivities
    assert torch.allclose(found, normalized(dense.embed.weight.grad.square()), rtol=1e-3, atol=1e-7)
