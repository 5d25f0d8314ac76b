"""Several processes equal one: calibration, DDP, FSDP2, DTensor; a failing rank ends the run. Gloo on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bitwright.quantization import QuantizationSpec
from bitwright.quantization.spec import QuantizationComponentFactory

from . import processes

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

CALIBRATED = [
    *(("eager", kind) for kind in processes.CALCULATORS),
    *(("graph", kind) for kind in ("moving_average", "percentile", "mse", "lsq", "lsq_plus")),
]
TRAINED = [
    *(("eager", kind) for kind in ("moving_average", "global_minmax", "percentile", "lsq", "lsq_plus")),
    *(("graph", kind) for kind in ("moving_average", "mse", "lsq")),
]
SHARDED = [
    *((kind, "before") for kind in ("moving_average", "lsq")),
    *((kind, when) for kind in ("lsq", "lsq_plus", "pact") for when in ("after", "never")),
]
LATER = [
    *((how, "lsq") for how in ("evaluated", "evaluated+calibrated", "loaded")),
    *((how, "lsq_plus") for how in ("evaluated", "loaded")),
]
LEARNED = ("lsq", "pact")


def spawn(world, folder, jobs):
    mp.spawn(processes.run, (world, str(folder), jobs), nprocs=world)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    jobs = [f"calibrate:{mode},{kind}" for mode, kind in CALIBRATED]
    jobs += [f"ddp:{mode},{kind}" for mode, kind in TRAINED]
    jobs += [f"fsdp:{kind},{when}" for kind, when in SHARDED] + [f"rates:{kind}" for kind in ("lsq", "lsq_plus")]
    jobs += [f"fsdp_later:{how},{kind}" for how, kind in LATER]
    jobs += [f"tensor_parallel:{kind}" for kind in ("moving_average", "lsq")]
    jobs += ["places:", "dtensor:default,0", "dtensor:default,1", "dtensor:lsq,0"]
    return spawn(2, tmp_path_factory.mktemp("two"), jobs)


def assert_equal(results, job, expected, **tolerance):
    for result in results:
        assert result[job].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result[job][name], value, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("mode", "kind"), CALIBRATED)
def test_two_shards_calibrate_as_one_process(two, mode, kind):
    """Ranges after calibration on shards of unequal length are those of one process on all of it."""
    exact = {} if kind in LEARNED else {"rtol": 0, "atol": 0}
    assert_equal(
        two,
        f"calibrate:{mode},{kind}",
        processes.calibrate(mode, [4, 3], [0, 1], **processes.CALCULATORS[kind]),
        **exact,
    )


def test_a_simulator_at_tensors_of_several_ranks_calibrates_as_in_one_process(two):
    """Such as that of a class token and the patches that it is joined with."""
    assert_equal(two, "places:", processes.observe_two_places([0, 1]), rtol=0, atol=0)


@pytest.mark.slow
def test_three_shards_calibrate_as_one_process(tmp_path):
    """The same with three processes."""
    kinds = ("moving_average", "percentile", "mse", "histogram", "lsq", "lsq_plus")
    results = spawn(3, tmp_path, [f"calibrate:eager,{kind}" for kind in kinds])
    for kind in kinds:
        expected = processes.calibrate("eager", [4, 3, 2], [0, 1, 2], **processes.CALCULATORS[kind])
        assert_equal(results, f"calibrate:eager,{kind}", expected)


@pytest.mark.parametrize(("mode", "kind"), TRAINED)
def test_ddp_trains_as_one_process_on_the_joined_batch(two, mode, kind):
    """Weights, learned steps and ranges agree after four steps."""
    quantizer, prepared = processes.prepare(mode, **processes.CALCULATORS[kind])
    processes.train(quantizer, prepared, prepared, [0, 1])
    assert_equal(two, f"ddp:{mode},{kind}", processes.state(prepared), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "calibrated"), SHARDED)
def test_fsdp_trains_as_one_process_on_the_joined_batch(two, kind, calibrated):
    """fully_shard on every layer: parameters are sharded, quantization parameters are those of whole weights.

    Learned steps begin as in one process, whether the calibration comes before sharding, after it, or not at all.
    """
    quantizer, prepared = processes.prepare("eager", **processes.CALCULATORS[kind])
    if calibrated != "never":
        processes.start(quantizer, prepared, [0, 1])
    processes.train(quantizer, prepared, prepared, [0, 1])
    assert_equal(two, f"fsdp:{kind},{calibrated}", processes.state(prepared), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("how", "kind"), LATER)
def test_sharded_models_lose_no_learned_step_before_training(two, how, kind):
    """What the root has gathered in an evaluation, and weights that are loaded late: trained as in one process."""
    assert_equal(
        two,
        f"fsdp_later:{how},{kind}",
        processes.lead_to_training(how.replace("+", ", "), kind, [0, 1], world=1),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", ["lsq", "lsq_plus"])
def test_learning_rates_of_sharded_steps(two, kind):
    """Parameter groups of a sharded model have the rates of the whole one."""
    quantizer, prepared = processes.prepare("eager", **processes.CALCULATORS[kind])
    processes.start(quantizer, prepared, [0, 1])
    assert_equal(two, f"rates:{kind}", processes.rates(prepared))


@pytest.mark.parametrize(("kind", "dim"), [("default", 0), ("default", 1), ("lsq", 0)])
def test_dtensors_get_the_parameters_of_the_whole(two, kind, dim):
    """A sharded weight is quantized as the whole one, and so is its gradient."""
    spec = QuantizationSpec(fake_quantize_cls=kind, dtype="int4")
    fq = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    whole = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    y = fq(whole)
    (y * torch.arange(64.0).reshape(8, 8)).sum().backward()
    expected = {"scale": fq.calculate_qparams()[0], "y": y, "grad": whole.grad}
    assert_equal(two, f"dtensor:{kind},{dim}", {k: v.detach() for k, v in expected.items()}, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["moving_average", "lsq"])
def test_tensor_parallel_layers_train_as_one_process(two, kind):
    """parallelize_module by columns and rows: parameters are those of whole tensors, also where outputs are sums."""
    quantizer, prepared = processes.prepare("eager", **processes.CALCULATORS[kind])
    processes.start(quantizer, prepared, [0, 1])
    processes.train(quantizer, prepared, prepared, [0, 1])
    assert_equal(two, f"tensor_parallel:{kind}", processes.state(prepared), rtol=1e-4, atol=1e-5)


_FAILING = """
import os, sys, time, torch, torch.distributed as dist
from tests.distributed import processes
dist.init_process_group("gloo")
quantizer, prepared = processes.prepare("eager")
with quantizer.calibration_mode():
    prepared(processes.batch(0, dist.get_rank())[0])
    if dist.get_rank() == 1:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.time()))
        raise ValueError("the data of rank 1 is broken")
"""
_SOON = 60  # seconds; torchrun itself gives the other rank up to 30


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_its_error(tmp_path: Path):
    """torchrun ends, soon after the error and with its message, though the other rank waits in the merge."""
    processes.calibrate("eager", [1], [0])  # what is compiled now need not be compiled by both ranks at once
    root = Path(__file__).parents[2]
    script, failed = tmp_path / "failing.py", tmp_path / "failed"
    script.write_text(_FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, failed]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=root, check=False)
    ended = time.time()
    assert done.returncode != 0
    assert "the data of rank 1 is broken" in done.stderr
    assert ended - float(failed.read_text()) < _SOON
