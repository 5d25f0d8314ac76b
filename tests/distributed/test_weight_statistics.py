"""What palettizer and pruner learn from data is the same in two processes as in one, also where one sees nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from bitwright.palettization import KMeansPalettizer
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

KINDS = ("palettes", "wanda", "sparsegpt")


class Experts(nn.Module):
    """Positive batches go to one layer, negative ones to the other, and those with three dimensions to both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 3:
            return self.up(x) + self.down(x)
        return self.up(x) if x.sum() > 0 else self.down(x)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 12).abs() * (1 if part < 2 else -1) for part in range(3)]


def calibrated(kind: str, data: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state after calibration."""
    model, example = Experts(), (torch.randn(1, 2, 12),)
    if kind == "palettes":
        palettizer = KMeansPalettizer(model)
        palettizer.prepare(example)
        with palettizer.calibration_mode(loss_fn=F.mse_loss) as helper:
            for x in data:
                helper.step(model(x), torch.ones(16, 12))
    else:
        spec = PruningSpec(pruning_algo=kind)
        config = MagnitudePrunerConfig(global_config=ModuleMagnitudePrunerConfig(op_state_spec={"weight": spec}))
        pruner = MagnitudePruner(model, config)
        pruner.prepare(example)
        with pruner.calibration_mode():
            for x in data:
                model(x)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


SHARES = {"each its own": (slice(0, 2), slice(2, 3)), "all in one": (slice(0, 3), slice(0, 0))}


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {
        f"{kind}, {share}": calibrated(kind, batches()[part[rank]]) for kind in KINDS for share, part in SHARES.items()
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_learn_what_one_learns(tmp_path):
    """A process that saw one expert only, or no batch at all, has the weights of all."""
    mp.spawn(process, (2, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for kind in KINDS:
        alone = calibrated(kind, batches())
        for share in SHARES:
            for result in results:
                found = result[f"{kind}, {share}"]
                assert found.keys() == alone.keys()
                for name, value in alone.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=f"{kind}, {share}: {name}")
