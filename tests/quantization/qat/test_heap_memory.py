"""Memory that a training step frees stays in the process for the next one."""

from __future__ import annotations

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
    found = []
    for _ in range(2):
        with quantizer.training_mode():
            faults()
            found.append(faults())
    print(*found)
""")


def page_faults() -> list[int]:
    """Faults of four rounds, within a block and within the next one."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


glibc_only = pytest.mark.skipif(heap_memory._mallopt() is None, reason="no glibc, or one that is set up")


@glibc_only
def test_steps_find_the_memory_of_the_one_before() -> None:
    """Without it the rounds have 122,880 faults, a page of 4 KiB each; with it the heap may grow by a tensor or two."""
    assert max(page_faults()) < 4 * 1024


@glibc_only
def test_the_heap_is_kept_until_the_last_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(heap_memory, "_mallopt", lambda: lambda *call: calls.append(call))
    with heap_memory.heap_kept():
        with heap_memory.heap_kept():
            begun = len(calls)
        assert len(calls) == begun
    assert calls[:2] == [(-3, 32 << 20), (-1, 2**31 - 1)]
    assert calls[begun:] == [(-1, 64 << 20)]


@glibc_only
@pytest.mark.parametrize(
    "setting",
    [
        {"BITWRIGHT_IDLE_MEGABYTES": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"},
    ],
)
def test_what_somebody_has_set_stays(setting: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert heap_memory._mallopt.__wrapped__() is not None
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert heap_memory._mallopt.__wrapped__() is None


@glibc_only
def test_other_settings_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache for each thread, which saves memory, the heap is kept as with it."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    assert heap_memory._mallopt.__wrapped__() is not None
