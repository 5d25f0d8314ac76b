"""Random small models and configurations through every exporter: what the prepared model computes, or refused."""

from __future__ import annotations

import traceback
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from bitwright.artifact import Artifact
from bitwright.errors import BitwrightError, ConfigMatchWarning
from bitwright.export.checkpoints import export_compressed_tensors, export_gguf, read_compressed_tensors, read_gguf
from bitwright.export.targets import TARGETS
from bitwright.export.torch_program import packed_copy
from bitwright.inspection import artifact_of
from tests.measures import sqnr

from .random_cases import NETWORKS, random_case
from .random_graphs import Graph

SEEDS = st.integers(0, 1 << 20)


def _prepared(seed, networks=NETWORKS):
    """The case of a seed, its prepared model and output; None where the configuration does not fit the model."""
    case = random_case(seed, networks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigMatchWarning)  # parts that do not fit stay as they are
            _, ready = case.compress()
    except (BitwrightError, ValueError, RuntimeError) as error:
        if not _is_ours(error):
            raise
        return None
    with torch.no_grad():
        return case, ready, tree_leaves(ready(*case.inputs))


def _is_ours(error):
    return isinstance(error, BitwrightError) or "bitwright" in traceback.extract_tb(error.__traceback__)[-1].filename


def _noise_is_explained(case, expected, found):
    """Whether all outputs are there, and as close to the expected ones as can be asked."""
    assert [y.shape for y in expected] == [y.shape for y in found], case.name
    for one, other in zip(expected, found, strict=True):
        assert sqnr(one.float(), other.float()) > _enough(case, one), case.name


def _enough(case, expected):
    """The smallest ratio in dB that differences in the order of sums explain.

    With quantized activations one such difference may move a code by one, and the codes behind it.
    """
    if expected.dtype != torch.float32:
        return 15 if case.has_activations or expected.dtype == torch.bfloat16 else 30
    if case.has_activations:
        return 25
    return 70 if isinstance(case.model, Graph) else 90  # differences of nearly equal values, and quotients


def _check_target(name, seed, path, networks):
    found = _prepared(seed, networks)
    if found is None:
        return
    case, ready, expected = found
    target, before = TARGETS[name], {key: value.clone() for key, value in ready.state_dict().items()}
    batches = target.keeps_shapes and case.mode == "eager"
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in case.inputs) if batches else None
    try:
        target.write(ready, case.inputs, path, {}, shapes)
        output = target.run(path, case.inputs) if target.run is not None else expected
    except (BitwrightError, ValueError, NotImplementedError) as error:
        if not _is_ours(error):
            raise
    else:
        _noise_is_explained(case, expected, output)
        if batches and target.run is not None:
            others = case.model.inputs(next(case.model.parameters()).dtype, batch=3)
            with torch.no_grad():
                _noise_is_explained(case, tree_leaves(ready(*others)), target.run(path, others))
    after = ready.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before), case.name


def _random(count):
    """Settings for as many cases as one second or so allows."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def _target_test(name, count, networks=NETWORKS):
    if TARGETS[name].missing() is not None:
        pytest.skip(TARGETS[name].missing())

    @_random(count)
    @given(SEEDS)
    def check(seed):
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            _check_target(name, seed, Path(folder) / f"model{TARGETS[name].suffix}", networks)

    check()


@pytest.mark.parametrize(("name", "count"), [("onnx", 4), ("coreai", 5), ("coreml", 3)])
def test_a_few_cases(name, count):
    _target_test(name, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("onnx", 60), ("onnx-nbits", 30), ("coreai", 60), ("coreml", 40), ("executorch", 30), ("torch", 40)],
)
def test_many_cases(name, count):
    _target_test(name, count)


@pytest.mark.parametrize("name", ["onnx", "coreai"])
def test_a_few_graphs_of_operators(name):
    _target_test(name, 4, [Graph])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("onnx", 80), ("coreai", 80), ("executorch", 30), ("torch", 40)])
def test_many_graphs_of_operators(name, count):
    _target_test(name, count, [Graph])


@_random(12)
@given(SEEDS)
def test_packed_models_compute_the_same(seed):
    """Bit for bit, but where folding a batch norm or a copied layout makes torch choose another kernel."""
    found = _prepared(seed)
    if found is None:
        return
    case, ready, expected = found
    with torch.no_grad():
        found = tree_leaves(packed_copy(ready)(*case.inputs))
    for one, other in zip(expected, found, strict=True):
        assert sqnr(one.float(), other.float()) > (110 if one.dtype == torch.float32 else 20), case.name


@_random(10)
@given(SEEDS)
def test_artifacts_and_checkpoints_decode_to_the_same(tmp_path_factory, seed):
    """Artifacts of everything, checkpoints of what they hold; where GGUF does not round scales it is exact."""
    found = _prepared(seed)
    if found is None:
        return
    case, ready, _ = found
    folder = tmp_path_factory.mktemp("case")
    artifact = artifact_of(ready)
    artifact.save(folder / "artifact")
    read = Artifact.load(folder / "artifact")
    assert all(torch.equal(artifact.decode(name), read.decode(name)) for name in artifact), case.name
    for write, reader, path in (
        (export_compressed_tensors, read_compressed_tensors, folder / "checkpoint"),
        (export_gguf, read_gguf, folder / "m.gguf"),
    ):
        try:
            write(ready, path, allow_dense=True)
        except ValueError as error:
            if not _is_ours(error):
                raise
            continue
        state = reader(path)
        for name in artifact.compressed:
            weight = artifact.decode(name)
            assert torch.equal(state[name].to(weight.dtype), weight), (case.name, name)
