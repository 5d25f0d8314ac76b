"""Settings shared by all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
