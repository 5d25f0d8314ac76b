"""Parameters that FSDP gathers anew have new values under an old version: nothing stale is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from bitwright.config.spec import CompressionTargetTensor
from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig, ModuleKMeansPalettizerConfig
from bitwright.palettization.spec import PalettizationSpec, STETrainingSpec
from bitwright.pruning import MagnitudePruner
from bitwright.quantization import QuantizationSpec
from bitwright.quantization.spec import QuantizationComponentFactory

from . import processes

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    import torch.distributed.fsdp  # noqa: F401  (FSDP is in use)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_unseen(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write as FSDP does."""
    version = parameter._version
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
        parameter.copy_(values)
    assert parameter._version == version


@pytest.mark.usefixtures("alone")
def test_a_learned_step_is_read_at_every_call() -> None:
    """The same parameter, address and version; another step."""
    spec = QuantizationSpec(fake_quantize_cls="lsq", dtype="int8")
    quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.ACTIVATION)
    x = torch.randn(4, 8)
    quantizer(x)
    quantizer.train()
    step = quantizer.qparams_calculator.scale
    write_unseen(step, torch.full_like(step, 0.25))
    assert quantizer.calculate_qparams()[0] == 0.25
    assert torch.equal(quantizer(x), (x / 0.25).round() * 0.25)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("training", [False, True])
def test_a_weight_is_quantized_at_every_call(training: bool) -> None:
    """An element that is none of those compared in the memory of a weight."""
    spec = QuantizationSpec(dtype="int8")
    quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.WEIGHT)
    weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    quantizer.train(training)
    for _ in range(2):
        quantizer(weight)
    changed = weight.detach().clone()
    changed[0, 1] = 100.0
    write_unseen(weight, changed)
    assert quantizer(weight)[0, 1] == pytest.approx(100.0, rel=1e-2)


@pytest.mark.usefixtures("alone")
def test_fsdp_of_one_process_trains_as_without() -> None:
    """The same numbers, bit for bit, at every step."""
    from torch.distributed.fsdp import fully_shard

    results = []
    for sharded in (False, True):
        quantizer, prepared = processes.prepare("eager", **processes.CALCULATORS["lsq"])
        processes.start(quantizer, prepared, [0])
        for layer in (prepared.first, prepared.second, prepared) if sharded else ():
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
        losses = []
        with quantizer.training_mode(prepared):
            for step in range(12):
                x, y = processes.batch(step, 0)
                optimizer.zero_grad()
                loss = F.cross_entropy(prepared(x), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.usefixtures("alone")
def test_parts_of_palettized_weights_are_saved_as_they_are() -> None:
    """Indices are brought up to date for a state dict; of a part of a weight, below masks too, they cannot be."""
    from torch.distributed.fsdp import fully_shard

    spec = PalettizationSpec(n_bits=2, training_strategy_spec=STETrainingSpec())
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    MagnitudePruner(model).prepare((x,))
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    prepared = KMeansPalettizer(model, config).prepare((x,))
    before = {name: tensor.clone() for name, tensor in prepared.state_dict().items() if name.endswith("indices")}
    fully_shard(prepared, mesh=dist.init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.neg_()
    state = prepared.state_dict()
    assert len(before) == 2
    assert all(torch.equal(state[name], indices) for name, indices in before.items())


def palettized_and_pruned(sharded: bool) -> tuple[KMeansPalettizer, nn.Module]:
    """Palettes that train, on masks."""
    torch.manual_seed(0)
    spec = PalettizationSpec(n_bits=2, training_strategy_spec=STETrainingSpec())
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    MagnitudePruner(model).prepare((x,))
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    palettizer = KMeansPalettizer(model, config)
    prepared = palettizer.prepare((x,))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in (*prepared, prepared):
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
    return palettizer, prepared


def train(prepared: nn.Module, steps: int) -> list[float]:
    """Train and return the losses."""
    optimizer, losses = torch.optim.SGD(prepared.parameters(), lr=0.5), []
    for step in range(steps):
        loss = prepared(torch.full((2, 8), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def indices_of(prepared: nn.Module) -> list[torch.Tensor]:
    """Return the indices of all palettes."""
    return [tensor.clone() for name, tensor in prepared.state_dict().items() if name.endswith("indices")]


@pytest.mark.usefixtures("alone")
def test_palettes_on_parts_of_weights_train_as_on_whole_ones() -> None:
    """The same losses, and on the end of training the indices of the whole weights."""
    results = []
    for sharded in (False, True):
        palettizer, prepared = palettized_and_pruned(sharded)
        with palettizer.training_mode(prepared):
            losses = train(prepared, 3)
        results.append((losses, indices_of(prepared)))
    (losses, indices), (its_losses, its_indices) = results
    assert losses == its_losses
    assert all(torch.equal(mine, its) for mine, its in zip(indices, its_indices, strict=True))


@pytest.mark.usefixtures("alone")
def test_no_process_waits_for_parts_after_an_error() -> None:
    """The others may not know of it; indices are brought up to date in the next forward."""
    palettizer, prepared = palettized_and_pruned(sharded=True)
    before = indices_of(prepared)

    def fail() -> None:
        with palettizer.training_mode(prepared):
            with torch.no_grad():
                for parameter in prepared.parameters():
                    parameter.neg_()
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        fail()
    assert all(map(torch.equal, before, indices_of(prepared)))
    prepared.eval()(torch.zeros(1, 8))
    assert not any(map(torch.equal, before, indices_of(prepared)))
