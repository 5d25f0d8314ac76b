"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# The quick suite draws the same examples every time, so that a change alone decides its outcome; `make test-all` looks
# for new ones. Time says nothing about correctness on a shared machine.
settings.register_profile("quick", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("BITWRIGHT_HYPOTHESIS", "quick"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker per core

sys.path.insert(0, str(Path(__file__).parent / "peer"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from looking through modules and test items, a million objects, again and again.

    Tracing makes so many objects that it would spend a fifth of the time of an export on those.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
