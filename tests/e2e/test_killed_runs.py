"""A run that is killed and started again ends with the bits of one that was left alone, whatever it trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bitwright.palettization import KMeansPalettizer, PalettizationSpec
from bitwright.palettization.config import PATSchedule
from bitwright.pruning import MagnitudePruner, PruningSpec
from bitwright.pruning.config import CosineDecaySchedule, PolynomialDecaySchedule
from bitwright.pruning.spec import NMStructured
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec import PerChannelGranularity
from tests.palettization.networks import config_of as palettizer_config
from tests.pruning.networks import config_of as pruner_config
from tests.quantization.qat.networks import MODES, ConvNet, images, make_config

STEPS, KILLED_AT = 8, 4
SCHEDULE = QATSchedule(enable_fake_quant=2, disable_observer=6, freeze_batch_norm=4, least_bits={0: 8, 3: 6, 5: 1})
PRUNING = PolynomialDecaySchedule(total_iters=7, update_frequency=2)

Compressors = tuple[list[Any], nn.Module]


def quantized(mode: str, kind: str, below: tuple[Any, ...] = (), model: nn.Module | None = None) -> Compressors:
    """QAT of a kind with a schedule, on top of what other techniques prepared."""
    config = make_config(mode, kind, SCHEDULE)
    if any(isinstance(other, KMeansPalettizer) for other in below):
        config.global_config.op_state_spec = None
    quantizer = Quantizer(ConvNet() if model is None else model, config)
    return [*below, quantizer], quantizer.prepare((images()[0],))


def clipped(mode: str) -> Compressors:
    """PACT for activations, LSQ for weights."""
    pact = QuantizationSpec(dtype="uint4", qscheme="asymmetric", fake_quantize_cls="pact")
    weight = QuantizationSpec(dtype="int4", granularity=PerChannelGranularity(axis=0), fake_quantize_cls="lsq")
    module = ModuleQuantizerConfig(
        op_input_spec={"*": pact},
        op_output_spec=None,
        op_state_spec={"weight": weight},
        qat_schedule=SCHEDULE,
    )
    quantizer = Quantizer(ConvNet(), QuantizerConfig(global_config=module, execution_mode=mode))
    return [quantizer], quantizer.prepare((images()[0],))


def palettized(strategy: str, **spec: Any) -> Compressors:
    """Palettes that train from the third step on."""
    model = ConvNet()
    chosen = PalettizationSpec(n_bits=2, training_strategy_spec={"type": strategy}, **spec)
    palettizer = KMeansPalettizer(model, palettizer_config(chosen, pat_schedule=PATSchedule(enable_fake_palettize=3)))
    return [palettizer], palettizer.prepare((images()[0],))


def pruned(schedule: Any = PRUNING, **spec: Any) -> Compressors:
    """Masks that grow with the steps."""
    model = ConvNet()
    pruner = MagnitudePruner(model, pruner_config(PruningSpec(**spec), sparsity_schedule=schedule))
    return [pruner], pruner.prepare((images()[0],))


def calibrated_pruning() -> Compressors:
    """Wanda's masks follow the norms that calibration found, which a checkpoint must hold."""
    [pruner], model = pruned(pruning_algo="wanda")
    with pruner.calibration_mode():
        model(images(50)[0])
    return [pruner], model


def on_top(below: Compressors, mode: str) -> Compressors:
    return quantized(mode, "plain", tuple(below[0]), below[1])


KINDS: dict[str, Callable[[str], Compressors]] = {
    "plain": lambda mode: quantized(mode, "plain"),
    "lsq": lambda mode: quantized(mode, "lsq"),
    "percentile": lambda mode: quantized(mode, "percentile"),
    "pact": clipped,
    "pruning, then QAT": lambda mode: on_top(pruned(target_sparsity=0.6), mode),
    "dkm, then QAT": lambda mode: on_top(palettized("dkm"), mode),
}
IN_PLACE: dict[str, Callable[[str], Compressors]] = {
    "dkm": lambda _: palettized("dkm"),
    "dkm, quantized palette": lambda _: palettized("dkm", lut_qspec=QuantizationSpec(dtype="int8")),
    "ste": lambda _: palettized("ste"),
    "frozen palettes": lambda _: palettized("default"),
    "polynomial": lambda _: pruned(),
    "cosine, all layers together": lambda _: pruned(CosineDecaySchedule(total_iters=6), scope="global"),
    "2:4": lambda _: pruned(pruning_scheme=NMStructured(n=2, m=4, axis=0)),
    "wanda": lambda _: calibrated_pruning(),
}
CASES = [*((kind, mode) for kind in KINDS for mode in MODES), *((kind, "in place") for kind in IN_PLACE)]


class Run:
    """One kind of training: its compressors, the model and an optimizer."""

    def __init__(self, kind: str, mode: str) -> None:
        torch.manual_seed(0)
        self.compressors, self.model = {**KINDS, **IN_PLACE}[kind](mode)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds; the pruner's own state is part of the model's."""
        named = {f"compressor {n}": part for n, part in enumerate(self.compressors) if hasattr(part, "state_dict")}
        return {"model": self.model, **named, "optimizer": self.optimizer}

    def train(self, step: int) -> dict[str, Any]:
        """Take one step, and return the checkpoint."""
        with ExitStack() as modes:
            for compressor in self.compressors:
                modes.enter_context(compressor.training_mode(self.model))
            x, y = images(step)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            for compressor in self.compressors:
                compressor.step()
            return {name: part.state_dict() for name, part in self.parts.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


_WORKER = """
import os, sys, torch
sys.path.insert(0, {root!r})
from tests.e2e.test_killed_runs import CASES, KILLED_AT, STEPS, Run
kill, folders = sys.argv[1] == "kill", sys.argv[2:]
for folder in folders:
    runs, done = [], []
    for n, (kind, mode) in enumerate(CASES):
        path = os.path.join(folder, str(n))
        runs.append(Run(kind, mode))
        state = torch.load(path, weights_only=True) if os.path.exists(path) else {{"step": 0}}
        if state["step"]:
            runs[-1].restore(state["parts"])
        done.append(state["step"])
    for step in range(STEPS):
        for n, run in enumerate(runs):
            if kill and step == KILLED_AT and n == len(runs) // 2:
                print("killable", flush=True)
                while True:
                    pass
            if step >= done[n]:
                path = os.path.join(folder, str(n))
                torch.save({{"parts": run.train(step), "step": step + 1}}, path + ".new")
                os.replace(path + ".new", path)
"""


def test_kill_9_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """One half of the kinds is killed behind the fifth step, the other behind the fourth."""
    root = Path(__file__).parents[2]
    script = tmp_path / "worker.py"
    script.write_text(_WORKER.format(root=str(root)))
    folders = [tmp_path / "part", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
    options: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "cwd": root}
    command = [sys.executable, str(script)]
    with subprocess.Popen([*command, "kill", str(folders[0])], stdout=subprocess.PIPE, text=True, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "killable"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    stopped = {torch.load(path, weights_only=True)["step"] for path in folders[0].iterdir()}
    assert stopped == {KILLED_AT, KILLED_AT + 1}
    subprocess.run([*command, "on", *map(str, folders)], check=True, **options)
    for number, (kind, mode) in enumerate(CASES):
        part, whole = (torch.load(folder / str(number), weights_only=True) for folder in folders)
        assert part["step"] == whole["step"] == STEPS
        assert_identical(whole["parts"], part["parts"], f"{kind} ({mode})")


def assert_identical(one: Any, other: Any, where: str) -> None:
    """Trees of mappings, lists, tensors and numbers are equal in every bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_identical(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_identical(a, b, f"{where}.{n}")
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=where)
    else:
        assert one == other, where
