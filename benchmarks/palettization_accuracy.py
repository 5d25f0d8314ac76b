"""What palettization costs in accuracy: granularities, calibration and training strategies, on two trained networks.

    python benchmarks/palettization_accuracy.py [--tasks digits] [--seeds 0 1] [--rows NAME ...] [--floats FOLDER]

A CNN on handwritten digits and a character transformer on the source of Python's standard library, both trained to
the end, the transformer as GPTs are (``_pretraining.py``). Every row starts from the same float weights; trained rows
see the same batches. Loss and accuracy are measured on data held out from training and calibration. Rows are kept by
seed, with their means, in benchmarks/results/palettization_accuracy.json; those that are there are not run again
without --again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _accuracy import main, normalized_anew
from _qat_tasks import loss_of, train
from torch import nn

from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.quantization.spec import QuantizationSpec

CALIBRATION = 32

Row = Callable[[nn.Module, dict[str, Any]], KMeansPalettizer]


def config_of(fast: bool = True, **spec: Any) -> KMeansPalettizerConfig:
    """One spec for all weights; where the number of characters or digits does not divide, groups run along axis 1."""

    def module(**changes: Any) -> ModuleKMeansPalettizerConfig:
        chosen = PalettizationSpec(**{**spec, **changes})
        return ModuleKMeansPalettizerConfig(op_state_spec={"weight": chosen}, enable_fast_kmeans_mode=fast)

    config = KMeansPalettizerConfig(global_config=module())
    granularity = spec.get("granularity")
    if granularity is not None and granularity.group_size > 1:
        config.set_module_name("(head|embed)", module(granularity=granularity.model_copy(update={"axis": 1})))
    return config


def prepared(model: nn.Module, job: dict[str, Any], config: KMeansPalettizerConfig) -> KMeansPalettizer:
    """A palettizer on the model, and what the plan says about its size."""
    palettizer = KMeansPalettizer(model, config)
    example = (job["batches"][0][0],)
    plan = palettizer.plan(example)
    weights = sum(row.dense_bytes for row in plan) // 4
    job["notes"]["bits"] = 8 * plan.compressed_bytes / weights
    palettizer.prepare(example)
    return palettizer


def plain(**spec: Any) -> Row:
    """Palettes of the finished weights."""
    return lambda model, job: prepared(model, job, config_of(**spec))


def calibrated(**spec: Any) -> Row:
    """Palettes weighted by squared gradients."""

    def run(model: nn.Module, job: dict[str, Any]) -> KMeansPalettizer:
        palettizer = prepared(model, job, config_of(**spec))
        with palettizer.calibration_mode(loss_fn=loss_of) as helper:
            for x, y in job["batches"][:CALIBRATION]:
                for part in range(0, len(x), 4):
                    helper.step(model(x[part : part + 4]), y[part : part + 4])
        return palettizer

    return run


def trained(strategy: dict[str, Any], **spec: Any) -> Row:
    """Palettes learned with the weights."""

    def run(model: nn.Module, job: dict[str, Any]) -> KMeansPalettizer:
        palettizer = prepared(model, job, config_of(training_strategy_spec=strategy, **spec))
        batches = job["batches"][: job["tuning_steps"]]
        with palettizer.training_mode():
            job["notes"]["step_seconds"] = train(
                model, batches, [{"params": model.parameters(), "lr": job["rate"] / 5}]
            )
        return palettizer

    return run


def grouped(size: int) -> PerGroupedChannelGranularity:
    """Groups of channels along the op's output axis."""
    return PerGroupedChannelGranularity(group_size=size)


ROWS: dict[str, Row] = {
    **{f"{bits} bit": plain(n_bits=bits) for bits in (2, 3, 4, 6)},
    **{f"{bits} bit, groups of 16": plain(n_bits=bits, granularity=grouped(16)) for bits in (2, 3, 4)},
    **{f"{bits} bit, groups of 4": plain(n_bits=bits, granularity=grouped(4)) for bits in (2, 3)},
    **{f"{bits} bit, per channel": plain(n_bits=bits, granularity=grouped(1)) for bits in (2, 3, 4)},
    "2 bit, channel scale": plain(n_bits=2, enable_per_channel_scale=True),
    "4 bit, int8 entries": plain(n_bits=4, lut_qspec=QuantizationSpec(dtype="int8")),
    "4 bit, int4 entries": plain(n_bits=4, lut_qspec=QuantizationSpec(dtype="int4")),
    "2 bit, batch norms anew": normalized_anew(plain(n_bits=2)),
    **{
        f"2 bit, groups of {size}, batch norms anew": normalized_anew(plain(n_bits=2, granularity=grouped(size)))
        for size in (16, 4)
    },
    **{f"{bits} bit, sensitivities": calibrated(n_bits=bits) for bits in (2, 3, 4)},
    **{
        f"{bits} bit, {name}, sensitivities": calibrated(n_bits=bits, granularity=grouped(size))
        for name, size in (("groups of 16", 16), ("per channel", 1))
        for bits in (2, 3, 4)
    },
    "2 bit, default training": trained({"type": "default"}, n_bits=2),
    "2 bit, straight through": trained({"type": "ste"}, n_bits=2),
    "2 bit, dkm": trained({"type": "dkm"}, n_bits=2),
    "2 bit, dkm, groups of 16": trained({"type": "dkm"}, n_bits=2, granularity=grouped(16)),
    "1 bit, dkm": trained({"type": "dkm"}, n_bits=1),
}


CLAIMS = {
    "learned palettes beat found ones": ("2 bit, dkm", "2 bit"),
    **{
        f"groups of {size} channels beat one palette at {bits} bit": (f"{bits} bit, groups of {size}", f"{bits} bit")
        for size, widths in ((16, (2, 3, 4)), (4, (2, 3)))
        for bits in widths
    },
    "palettes of single channels beat one palette at 2 bit": ("2 bit, per channel", "2 bit"),
    "batch norms anew help at 2 bit": ("2 bit, batch norms anew", "2 bit"),
    **{
        f"groups of {size} channels beat one palette at 2 bit, batch norms anew": (
            f"2 bit, groups of {size}, batch norms anew",
            "2 bit, batch norms anew",
        )
        for size in (16, 4)
    },
    **{f"sensitivities help at {bits} bit": (f"{bits} bit, sensitivities", f"{bits} bit") for bits in (2, 3, 4)},
    **{
        f"sensitivities help at {bits} bit, {name}": (f"{bits} bit, {name}, sensitivities", f"{bits} bit, {name}")
        for name in ("groups of 16", "per channel")
        for bits in (2, 3, 4)
    },
}


if __name__ == "__main__":
    warnings.filterwarnings("error")
    main(__doc__, ROWS, Path(__file__).parent / "results/palettization_accuracy.json", CLAIMS)
