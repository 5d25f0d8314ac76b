"""Memory that a training step frees stays in the process for the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from bitwright._utils import heap_memory

SCRIPT = textwrap.dedent("""
    import contextlib, resource, torch
    from torch import nn
    from bitwright.quantization import Quantizer, QuantizerConfig

    def faults(rounds=4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(rounds):
            kept = [torch.ones(1 << 20) for _ in range(30)]
            del kept
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    quantizer = Quantizer(nn.Linear(4, 4), QuantizerConfig.presets.w8())
    quantizer.prepare((torch.randn(1, 4),))
    faults()
    found = [faults()]
    for _ in range(2):
        with quantizer.training_mode():
            faults(1)
            found.append(faults())
        found.append(faults())
    print(*found)
""")


def page_faults(**environment: str) -> list[int]:
    """Faults of four rounds: before training, within, between, within again, and after it."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=others | environment)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(heap_memory._mallopt() is None, reason="another C library than glibc, or one that is set up")
def test_steps_find_the_memory_of_the_one_before() -> None:
    before, within, between, again, after = page_faults()
    assert before > 100
    assert max(within, again) < before / 10
    assert min(between, after) > before / 10


@pytest.mark.skipif(heap_memory._mallopt() is None, reason="another C library than glibc, or one that is set up")
@pytest.mark.parametrize(
    "setting",
    [
        {"BITWRIGHT_IDLE_MEGABYTES": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_MMAP_THRESHOLD_": "33554432"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"},
    ],
)
def test_what_somebody_has_set_stays(setting: dict[str, str]) -> None:
    before, within, *_ = page_faults(**setting)
    assert before > 100
    assert within > before / 10
