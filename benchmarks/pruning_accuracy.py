"""What pruning costs in accuracy: scores, patterns, schedules and removal of channels, on two trained networks.

    python benchmarks/pruning_accuracy.py [--tasks digits] [--seeds 0 1] [--rows NAME ...] [--floats FOLDER]

A CNN on handwritten digits and a character transformer on the source of Python's standard library, both trained to
the end, the transformer as GPTs are (``_pretraining.py``). Every row starts from the same float weights; calibrated
rows see the same data, trained rows the same batches. Loss and accuracy are measured on data held out from training
and calibration. Rows are kept by seed, with their means, in benchmarks/results/pruning_accuracy.json; those that are
there are not run again without --again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _accuracy import main, normalized_anew
from _qat_tasks import train
from torch import nn

from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.pruning.config import CosineDecaySchedule, PolynomialDecaySchedule, SparsityScheduleBase
from bitwright.pruning.spec import ChannelStructured, NMStructured

CALIBRATION = 16
SHARES = (0.5, 0.6, 0.7)

Row = Callable[[nn.Module, dict[str, Any]], MagnitudePruner]


def config_of(
    task: str, schedule: SparsityScheduleBase | None = None, everything: bool = False, head: bool = True, **spec: Any
) -> MagnitudePrunerConfig:
    """One spec for all weights that multiply activations; first and depthwise layers and embeddings stay dense, and the
    last layer too unless ``head``."""
    module = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(**spec)}, sparsity_schedule=schedule)
    config = MagnitudePrunerConfig(global_config=module)
    if not head:
        config = config.without("head")
    return config if everything else config.without("embed" if task == "characters" else "(stem|depth)")


def prepared(model: nn.Module, job: dict[str, Any], config: MagnitudePrunerConfig) -> MagnitudePruner:
    """A pruner on the model."""
    pruner = MagnitudePruner(model, config)
    pruner.prepare((job["batches"][0][0],))
    return pruner


def oneshot(**spec: Any) -> Row:
    """Masks on the finished weights; calibrated where the algorithm wants it."""

    def run(model: nn.Module, job: dict[str, Any]) -> MagnitudePruner:
        pruner = prepared(model, job, config_of(job["task"], **spec))
        if spec.get("pruning_algo", "default") != "default":
            with pruner.calibration_mode():
                for x, _ in job["batches"][:CALIBRATION]:
                    model(x)
        return pruner

    return run


def trained(schedule: type[Any] | None = None, everything: bool = False, **spec: Any) -> Row:
    """Masks that follow a schedule while the weights learn."""

    def run(model: nn.Module, job: dict[str, Any]) -> MagnitudePruner:
        steps = job["tuning_steps"]
        made = None if schedule is None else schedule(total_iters=2 * steps // 3, update_frequency=5)
        pruner = prepared(model, job, config_of(job["task"], made, everything, **spec))
        with pruner.training_mode():
            rates = [{"params": model.parameters(), "lr": job["rate"] / 5}]
            train(model, job["batches"][:steps], rates, after=pruner.step)
        return pruner

    return run


def shrunk(**spec: Any) -> Row:
    """Channels pruned while training, and then removed."""

    def run(model: nn.Module, job: dict[str, Any]) -> MagnitudePruner:
        pruner = trained(PolynomialDecaySchedule, True, pruning_scheme=ChannelStructured(), **spec)(model, job)
        model.eval()
        report = pruner.shrink((job["batches"][0][0],))
        job["notes"]["parameters"] = report.parameters_after / report.parameters_before
        return pruner

    return run


ROWS: dict[str, Row] = {
    **{
        f"{name} {share:.0%}": oneshot(pruning_algo=key, target_sparsity=share)
        for share in SHARES
        for name, key in (("magnitude", "default"), ("wanda", "wanda"), ("sparsegpt", "sparsegpt"))
    },
    **{
        f"wanda {share:.0%}, tensor": oneshot(pruning_algo="wanda", target_sparsity=share, scope="tensor")
        for share in SHARES
    },
    **{f"magnitude {share:.0%}, rows": oneshot(target_sparsity=share, scope="row") for share in SHARES},
    **{
        f"{name}, head dense": oneshot(target_sparsity=0.6, head=False, **spec)
        for name, spec in (
            ("magnitude 60%", {}),
            ("magnitude 60%, rows", {"scope": "row"}),
            ("wanda 60%", {"pruning_algo": "wanda"}),
            ("wanda 60%, tensor", {"pruning_algo": "wanda", "scope": "tensor"}),
        )
    },
    **{
        f"{name} 60%, batch norms anew": normalized_anew(oneshot(pruning_algo=key, target_sparsity=0.6))
        for name, key in (("magnitude", "default"), ("wanda", "wanda"), ("sparsegpt", "sparsegpt"))
    },
    **{f"magnitude {share:.0%}, global": oneshot(target_sparsity=share, scope="global") for share in SHARES},
    **{
        f"{name} 2:4": oneshot(pruning_algo=key, pruning_scheme=NMStructured(n=2, m=4))
        for name, key in (("magnitude", "default"), ("wanda", "wanda"), ("sparsegpt", "sparsegpt"))
    },
    "magnitude 80%, trained at once": trained(target_sparsity=0.8),
    "magnitude 80%, polynomial": trained(PolynomialDecaySchedule, target_sparsity=0.8),
    "magnitude 80%, cosine": trained(CosineDecaySchedule, target_sparsity=0.8),
    "channels 50%, removed": shrunk(target_sparsity=0.5),
}


CLAIMS = {
    **{f"sparsegpt beats magnitude at {s:.0%}": (f"sparsegpt {s:.0%}", f"magnitude {s:.0%}") for s in SHARES},
    **{f"wanda beats magnitude at {s:.0%}": (f"wanda {s:.0%}", f"magnitude {s:.0%}") for s in SHARES},
    **{
        f"wanda beats magnitude at {s:.0%}, both in rows": (f"wanda {s:.0%}", f"magnitude {s:.0%}, rows")
        for s in SHARES
    },
    **{
        f"wanda beats magnitude at {s:.0%}, both in tensors": (f"wanda {s:.0%}, tensor", f"magnitude {s:.0%}")
        for s in SHARES
    },
    "wanda beats magnitude at 60%, head dense": ("wanda 60%, head dense", "magnitude 60%, head dense"),
    "wanda beats magnitude at 60%, head dense, both in rows": (
        "wanda 60%, head dense",
        "magnitude 60%, rows, head dense",
    ),
    "wanda beats magnitude at 60%, head dense, both in tensors": (
        "wanda 60%, tensor, head dense",
        "magnitude 60%, head dense",
    ),
    **{
        f"{name} beats magnitude at 60%, batch norms anew": (
            f"{name} 60%, batch norms anew",
            "magnitude 60%, batch norms anew",
        )
        for name in ("wanda", "sparsegpt")
    },
}


if __name__ == "__main__":
    warnings.filterwarnings("error")
    warnings.filterwarnings("default", message=r".*\[block-size\].*")  # layers that 2:4 does not divide stay dense
    main(__doc__, ROWS, Path(__file__).parent / "results/pruning_accuracy.json", CLAIMS)
