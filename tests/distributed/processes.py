"""What the processes of the distributed tests run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization._distributed import merged_statistics
from bitwright.quantization.qat import parameter_groups
from bitwright.quantization.spec import PerChannelGranularity, QuantizationComponentFactory

CALCULATORS = {
    "moving_average": {"qparam_calculator_cls": "moving_average", "averaging_constant": 0.3},
    "global_minmax": {"qparam_calculator_cls": "global_minmax"},
    "percentile": {"range_calculator_cls": "percentile"},
    "mse": {"range_calculator_cls": "mse"},
    "histogram": {"range_calculator_cls": "histogram"},
    "lsq": {"fake_quantize_cls": "lsq"},
    "lsq_plus": {"fake_quantize_cls": "lsq_plus", "qscheme": "asymmetric", "range_calculator_cls": "mse"},
    "pact": {"fake_quantize_cls": "pact", "qscheme": "asymmetric"},
}


class Net(nn.Module):
    """Two linear layers; no batch norm, whose statistics are another matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that differ in scale from process to process, and labels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 8, generator=generator) * (1 + rank + step)
    return x, torch.randint(0, 4, (8,), generator=generator)


def prepare(mode: str, change=None, **activation):
    """A W8A8 network, changed before, with the given activation spec; the same in every process."""
    torch.manual_seed(0)
    spec = QuantizationSpec(**activation)
    kind = {"fake_quantize_cls": "lsq"} if activation.get("fake_quantize_cls") == "lsq" else {}
    weight = QuantizationSpec(granularity=PerChannelGranularity(axis=0), **kind)
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={"*": spec}, op_output_spec={"*": spec}, op_state_spec={"weight": weight}
        ),
        execution_mode=mode,
    )
    net = Net()
    quantizer = Quantizer(net if change is None else change(net), config)
    return quantizer, quantizer.prepare((torch.randn(8, 8),), **({} if mode == "eager" else _any_batch()))


def _any_batch():
    return {"dynamic_shapes": ({0: torch.export.Dim("batch", min=2, max=64)},)}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}


def calibrate(mode: str, steps: list[int], ranks: list[int], **activation) -> dict[str, torch.Tensor]:
    """Calibrate on ``steps[rank]`` batches of each of ``ranks``, joined."""
    quantizer, prepared = prepare(mode, **activation)
    with quantizer.calibration_mode(), torch.no_grad():
        for step in range(max(steps[rank] for rank in ranks)):
            prepared(torch.cat([batch(step, rank)[0] for rank in ranks if step < steps[rank]]))
    return state(prepared)


def start(quantizer, prepared, ranks: list[int]) -> None:
    """Calibrate on one batch of each of ``ranks``, joined."""
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(torch.cat([batch(9, rank)[0] for rank in ranks]))


def train(quantizer, prepared, model: nn.Module, ranks: list[int], steps: int = 4, optimizer=None) -> None:
    """Train on the batches of ``ranks``, joined."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    with quantizer.training_mode(prepared):
        for step in range(steps):
            parts = [batch(step, rank) for rank in ranks]
            x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def run(rank: int, world: int, folder: str, jobs: list[str]) -> None:
    """Entry point of a process: do the jobs, write the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {}
    for job in jobs:
        name, _, rest = job.partition(":")
        results[job] = globals()[f"job_{name}"](rank, world, *rest.split(","))
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def job_calibrate(rank: int, world: int, mode: str, kind: str):
    return calibrate(mode, [4, 3, 2][:world], [rank], **CALCULATORS[kind])


def observe_two_places(ranks: list[int]) -> dict[str, torch.Tensor]:
    """The range of a simulator that stands at a matrix and at a tensor of three dimensions, after three steps."""
    spec = QuantizationSpec(averaging_constant=0.3)
    fq = QuantizationComponentFactory.create_fake_quantizer(spec, "activation")
    fq(torch.ones(2, 4))  # the example inputs of prepare
    fq.qparams_calculator.tensors_per_step = 2
    fq.reset_statistics()
    with merged_statistics([fq]):
        for step in range(3):
            x = torch.cat([batch(step, rank)[0] for rank in ranks])
            fq(x)
            fq(x.reshape(-1, 2, 4) * 3)
    return state(fq)


def job_places(rank: int, world: int, _: str):
    return observe_two_places([rank])


def job_ddp(rank: int, world: int, mode: str, kind: str):
    quantizer, prepared = prepare(mode, **CALCULATORS[kind])
    train(quantizer, prepared, nn.parallel.DistributedDataParallel(prepared), [rank])
    return state(prepared)


def shard(prepared: nn.Module, *layers: nn.Module) -> None:
    """FSDP2 on layers and on the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in (*layers, prepared):
        fully_shard(layer)


def full_state(prepared: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors, those that are sharded whole."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in prepared.state_dict().items()
        if torch.is_tensor(value)
    }


def job_fsdp(rank: int, world: int, kind: str, calibrated: str):
    quantizer, prepared = prepare("eager", **CALCULATORS[kind])
    if calibrated == "before":
        start(quantizer, prepared, [rank])
    shard(prepared, prepared.first, prepared.second)
    if calibrated == "after":
        start(quantizer, prepared, [rank])
    train(quantizer, prepared, prepared, [rank])
    return full_state(prepared)


def lead_to_training(how: str, kind: str, ranks: list[int], world: int) -> dict[str, torch.Tensor]:
    """Shard one layer and the root, which holds the other, do what ``how`` says, and train.

    Args:
        how: "evaluated", then trained; "evaluated, calibrated", then an optimizer is made; "loaded" float weights that
            are three times as large, then calibrated.
        kind: of ranges.
        ranks: whose batches are joined.
        world: number of processes; 1 for the model as it is.
    """
    quantizer, prepared = prepare("eager", **CALCULATORS[kind])
    floats = {k: 3 * v.detach() for k, v in prepared.state_dict().items() if k.endswith(("original", "bias"))}
    if world > 1:
        shard(prepared, prepared.first)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    if how == "loaded":
        load_floats(prepared, floats)
    else:
        prepared.eval()
        with torch.no_grad():
            prepared(torch.cat([batch(7, rank)[0] for rank in ranks]))
    if how != "evaluated":
        start(quantizer, prepared, ranks)
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    train(quantizer, prepared, prepared, ranks, optimizer=optimizer)
    return full_state(prepared)


def load_floats(prepared: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load whole float tensors into a model that may be sharded."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if dist.is_initialized():
        set_model_state_dict(prepared, state, options=StateDictOptions(full_state_dict=True, strict=False))
    else:
        prepared.load_state_dict(state, strict=False)


def job_fsdp_later(rank: int, world: int, how: str, kind: str):
    return lead_to_training(how.replace("+", ", "), kind, [rank], world)


def rates(prepared: nn.Module) -> dict[str, torch.Tensor]:
    """Learning rates of the parameter groups."""
    return {str(i): torch.tensor(group["lr"]) for i, group in enumerate(parameter_groups(prepared, 1e-3))}


def job_rates(rank: int, world: int, kind: str):
    quantizer, prepared = prepare("eager", **CALCULATORS[kind])
    start(quantizer, prepared, [rank])
    shard(prepared, prepared.first, prepared.second)
    return rates(prepared)


def parallelize(net: nn.Module) -> nn.Module:
    """Columns of the first layer and rows of the second in each process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(net, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def job_tensor_parallel(rank: int, world: int, kind: str):
    quantizer, prepared = prepare("eager", parallelize, **CALCULATORS[kind])
    start(quantizer, prepared, [0, 1])
    train(quantizer, prepared, prepared, [0, 1])
    return full_state(prepared)


def job_dtensor(rank: int, world: int, kind: str, dim: str):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    spec = QuantizationSpec(fake_quantize_cls=kind, dtype="int4")
    fq = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(int(dim))]))
    y = fq(weight)
    (y * distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(int(dim))])).sum().backward()
    assert tuple(y.to_local().shape) != (8, 8)
    return {"scale": fq.calculate_qparams()[0].clone(), "y": y.full_tensor(), "grad": weight.grad.full_tensor()}
