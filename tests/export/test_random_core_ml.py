"""Random models in specs that Core ML has: the package's constants are the prepared model's weights."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("coremltools")

from bitwright.demo.verification import verify
from bitwright.errors import BitwrightError
from bitwright.export.targets import TARGETS
from bitwright.quantization import QuantizationSpec
from bitwright.quantization.spec import PerBlockGranularity

from . import random_cases
from .random_networks import NETWORKS, Recurrent
from .test_random_models import _is_ours, _prepared


def _weight_spec(rng, kind):
    granularity = random_cases._granularity(rng, kind)
    options = {} if granularity is None else {"granularity": granularity}
    if isinstance(granularity, PerBlockGranularity) and isinstance(granularity.block_size, tuple):
        options = {}
    scheme = rng.choice(["symmetric", "asymmetric"])
    return QuantizationSpec(dtype=rng.choice(["int8", "uint8", "int4", "uint4"]), qscheme=scheme, **options)


def _activation_spec(rng):
    scheme = rng.choice(["symmetric", "asymmetric"])
    spec = QuantizationSpec(dtype=rng.choice(["int8", "uint8"]), qscheme=scheme)
    return rng.choice([None, spec])


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_packages_hold_the_weights(count, monkeypatch, tmp_path_factory):
    """Constants are in half precision, so about 70 dB; weights of RNNs are not packed there and have no constant."""
    monkeypatch.setattr(random_cases, "_weight_spec", _weight_spec)
    monkeypatch.setattr(random_cases, "_activation_spec", _activation_spec)
    monkeypatch.setattr(random_cases, "NETWORKS", [kind for kind in NETWORKS if kind is not Recurrent])
    written = []

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, 1 << 20))
    def check(seed):
        found = _prepared(seed)
        if found is None:
            return
        case, ready, _ = found
        path = tmp_path_factory.mktemp("package") / "model.mlpackage"
        try:
            TARGETS["coreml"].write(ready, case.inputs, path, {}, None)
        except (BitwrightError, ValueError) as error:
            if not _is_ours(error):
                raise
            return
        written.append(case.name)
        assert verify(TARGETS["coreml"], path, ready, case.model, case.inputs[0]).weights_db > 60, case.name

    check()
    assert len(written) >= count // 4, "most were refused"
