"""Finalizing again, for another backend, or in the middle of something: right, or refused with a clear message."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bitwright.errors import BitwrightError
from bitwright.export.targets import TARGETS
from bitwright.quantization import QuantizationSpec
from tests.measures import sqnr

from .models import W8, Mlp, built, palettized, prepared, pruned

BACKENDS = ("coreai", "coreml", "_torch")
SLOW = [pytest.mark.slow]


def _compressor(kind, mode="eager"):
    model, x = built(Mlp)
    if kind == "quantizer":
        return *prepared(model, x, W8, QuantizationSpec(), mode), x
    return *(palettized(model, x, n_bits=4) if kind == "palettizer" else pruned(model, x)), x


CASES = [("quantizer", "eager"), ("quantizer", "graph"), ("palettizer", "eager"), ("pruner", "eager")]


PAIRS = [
    pytest.param(first, second, marks=[] if (first, second) in (("coreai", "coreml"), ("_torch", "coreai")) else SLOW)
    for first in BACKENDS
    for second in BACKENDS
]


@pytest.mark.parametrize(("kind", "mode"), CASES)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_finalizes_in_a_row(kind, mode, first, second):
    """The second one gives what the first one would have given, or says that the model is not prepared any more."""
    if "coreai" in (first, second):
        pytest.importorskip("coreai_torch")
    compressor, ready, x = _compressor(kind, mode)
    expected = ready(x).detach()
    assert sqnr(expected, compressor.finalize(backend=first)(x)) > 60
    try:
        again = compressor.finalize(backend=second)
    except RuntimeError as error:
        if "prepared" not in str(error) or mode == "graph":
            raise
    else:
        assert sqnr(expected, again(x)) > 60


@pytest.mark.parametrize("kind", ["quantizer", "palettizer", "pruner"])
def test_a_second_finalize_in_place_says_what_happened_and_what_to_do(kind):
    """The remedy that the message names works: every backend gets a copy."""
    compressor, ready, x = _compressor(kind)
    expected = ready(x).detach()
    for backend in ("coreml", "_torch"):
        assert sqnr(expected, compressor.finalize(copy.deepcopy(ready), backend=backend)(x)) > 60
    compressor.finalize(backend="coreml")
    with pytest.raises(RuntimeError, match=r"must be prepared.*not any more.*copy\.deepcopy\(prepared\)"):
        compressor.finalize(backend="coreml")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_finalize_inside_a_mode_is_refused(kind, mode, backend):
    """The message names the mode; afterwards the model is finalized as if nothing had happened."""
    if backend == "coreai":
        pytest.importorskip("coreai_torch")
    compressor, ready, x = _compressor(kind, mode)
    for name in ("calibration_mode", "training_mode"):
        if name == "calibration_mode" and kind != "quantizer":
            continue  # the others calibrate for algorithms that look at data only
        with getattr(compressor, name)(), pytest.raises(RuntimeError, match=r"calibrat|train"):
            compressor.finalize(backend=backend)
    expected = ready.eval()(x).detach()
    assert sqnr(expected, compressor.finalize(backend=backend)(x)) > 60


@pytest.mark.parametrize(
    ("kind", "mode"), [CASES[1], *(pytest.param(*case, marks=SLOW) for case in CASES if case[0] != "quantizer")]
)
def test_writers_leave_the_prepared_model_usable(kind, mode, tmp_path):
    """Target after target from one prepared model; then it is finalized still."""
    compressor, ready, x = _compressor(kind, mode)
    with torch.no_grad():
        expected = ready(x)
    for name in ("torch", "onnx", "coreai", "coreml"):
        target = TARGETS[name]
        if target.missing() is None:
            target.write(ready, (x,), tmp_path / f"m{target.suffix}", {}, None)
            (tmp_path / f"m{target.suffix}").rename(tmp_path / name)
            with torch.no_grad():
                assert torch.equal(ready(x), expected)
    assert torch.equal(compressor.finalize(backend="_torch")(x).detach(), expected)


@pytest.mark.parametrize("backend", ["coreai", "coreml"])
@pytest.mark.parametrize("kind", ["quantizer", "palettizer", "pruner"])
def test_writers_take_finalized_models_too(kind, backend, tmp_path):
    """What finalize() made is converted by the writer of the same target."""
    target = TARGETS[backend]
    if target.missing() is not None:
        pytest.skip(target.missing())
    compressor, ready, x = _compressor(kind)
    expected = ready(x).detach()
    final = compressor.finalize(backend=backend)
    path = target.write(final, (x,), tmp_path / f"m{target.suffix}", {}, None)
    if target.run is not None:
        assert sqnr(expected, target.run(path, [x])[0]) > 60


@pytest.mark.parametrize("backend", ["coreai", "coreml"])
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_models_finalized_for_one_target_are_not_written_for_others(kind, mode, backend, tmp_path):
    """The message says why, and which model to take; artifacts and checkpoints would hold the target's own tensors."""
    if TARGETS[backend].missing() is not None:
        pytest.skip(TARGETS[backend].missing())
    compressor, _, x = _compressor(kind, mode)
    whole = nn.Sequential(compressor.finalize(backend=backend))
    title = {"coreai": "Core AI", "coreml": "Core ML"}[backend]
    for name, target in TARGETS.items():
        if name != backend and target.missing() is None:
            with pytest.raises(BitwrightError, match=f"finalized for {title}.*prepared"):
                target.write(whole, (x,), tmp_path / f"model{target.suffix}", {}, None)
            assert not any(tmp_path.iterdir()), name
