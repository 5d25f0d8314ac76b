"""Whatever happens to the files, the answer is an error: never a wrong tensor, never code run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bitwright.artifact import Artifact, ArtifactError
from bitwright.export.samples import SAMPLES, sample_weight
from bitwright.quantization import Quantizer, QuantizerConfig


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4, bias=False))
    quantizer = Quantizer(net, QuantizerConfig(execution_mode="eager"))
    prepared = quantizer.prepare((torch.randn(2, 16),))
    folder = tmp_path_factory.mktemp("damage") / "good"
    Artifact.from_model(prepared, config=quantizer._config).save(folder)
    return folder


@pytest.fixture
def copy(artifact, tmp_path):
    shutil.copytree(artifact, tmp_path / "copy")
    return tmp_path / "copy"


def _read_everything(folder):
    loaded = Artifact.load(folder)
    return {name: loaded.decode(name) for name in loaded}


def _files(folder):
    return sorted(folder.iterdir())


def test_the_undamaged_copy_loads(copy):
    assert len(_read_everything(copy)) == 3


@pytest.mark.parametrize("which", [0, 1])
def test_any_single_bit_flip_is_found(artifact, tmp_path, which):
    """A few hundred positions, every region of both files, all eight bits."""
    path = _files(artifact)[which]
    data = path.read_bytes()
    rng = random.Random(which)
    work = tmp_path / "flip"
    shutil.copytree(artifact, work)
    for position in sorted(rng.sample(range(len(data)), 250)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        (work / path.name).write_bytes(flipped)
        with pytest.raises(ArtifactError):
            _read_everything(work)


@pytest.mark.parametrize("which", [0, 1])
def test_any_truncation_or_growth_is_found(artifact, tmp_path, which):
    path = _files(artifact)[which]
    data = path.read_bytes()
    work = tmp_path / "cut"
    shutil.copytree(artifact, work)
    for changed in [data[:n] for n in range(0, len(data), max(1, len(data) // 60))] + [data + b"\0", data + b"}"]:
        (work / path.name).write_bytes(changed)
        with pytest.raises(ArtifactError):
            _read_everything(work)


@pytest.mark.parametrize("which", [0, 1])
def test_missing_files_are_named(copy, which):
    path = _files(copy)[which]
    path.unlink()
    with pytest.raises(ArtifactError, match=path.name.replace(".", r"\.")):
        Artifact.load(copy)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ArtifactError, match="is no artifact"):
        Artifact.load(tmp_path / "nothing")


def _rewrite(folder, change):
    """Change the manifest and give it a digest that fits, as somebody hostile would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest["digest"] = "0" * 64
    text = json.dumps(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace("0" * 64, digest))


def _layout(manifest, name="0.weight"):
    return manifest["tensors"][name]["layout"]


def _activation(manifest):
    return next(iter(manifest["activations"].values()))["layout"]


BLOCKS = {"granularity": "per_block", "axis": None}


HOSTILE = {
    "future version": lambda m: m.update(format_version=2),
    "version as bool": lambda m: m.update(format_version=True),
    "other format": lambda m: m.update(format="something"),
    "unknown field": lambda m: m.update(hook="os.system"),
    "unknown field in a layout": lambda m: _layout(m).update(reduce="x"),
    "unknown kind": lambda m: _layout(m).update(kind="pickled"),
    "unknown number format": lambda m: _layout(m).update(format="int9"),
    "unknown dtype": lambda m: _layout(m, "0.bias").update(dtype="object"),
    "path outside": lambda m: m["files"][0].update(name="../evil.safetensors"),
    "absolute path": lambda m: m["files"][0].update(name="/etc/passwd.safetensors"),
    "pickle file": lambda m: m["files"][0].update(name="weights.pt"),
    "file twice": lambda m: m["files"].append(m["files"][0]),
    "file that is not there": lambda m: m["tensors"]["0.weight"].update(file=7),
    "negative file number": lambda m: m["tensors"]["0.weight"].update(file=-1),
    "negative size": lambda m: _layout(m).update(shape=[-8, -16]),
    "other shape": lambda m: _layout(m).update(shape=[16, 8], block_size=[16, 1]),
    "huge shape": lambda m: _layout(m).update(shape=[1 << 40, 1 << 40]),
    "too many dimensions": lambda m: _layout(m).update(shape=[1] * 64),
    "fractional size": lambda m: _layout(m).update(shape=[8.0, 16.0]),
    "size as text": lambda m: _layout(m).update(shape=["8", "16"]),
    "blocks that do not divide": lambda m: _layout(m).update(block_size=[3, 16]),
    "blocks of nothing": lambda m: _layout(m).update(block_size=[0, 0]),
    "codes of another range": lambda m: _layout(m).update(quant_min=-300),
    "empty range": lambda m: _layout(m).update(quant_min=100, quant_max=100),
    "zero point out of range": lambda m: _layout(m).update(zero_point=200),
    "mask that is not there": lambda m: _layout(m).update(kept=3),
    "part that is not there": lambda m: _layout(m).update(zero_point=None),
    "minval that is not there": lambda m: _layout(m).update(formulation="minval", zero_point=None),
    "alias of nothing": lambda m: m["aliases"].update(x="nothing"),
    "alias that hides": lambda m: m["aliases"].update({"0.weight": "1.weight"}),
    "tensor left out": lambda m: m["tensors"].pop("0.bias"),
    "tensor without parts": lambda m: m["tensors"].update(extra={"file": 0, "layout": _layout(m)}),
    "infinite number": lambda m: _layout(m).update(quant_max=float("inf")),
    "not a list of files": lambda m: m.update(files={}),
    "activation out of range": lambda m: _activation(m).update(quant_max=1 << 20),
    "activation of an unknown format": lambda m: _activation(m).update(format="x"),
    "activation of an unknown granularity": lambda m: _activation(m).update(granularity="x"),
    "activation of a path": lambda m: _activation(m).update(granularity="../../etc/passwd"),
    "activation of a far axis": lambda m: _activation(m).update(granularity="per_channel", axis=10**30),
    "activation of an axis far from the end": lambda m: _activation(m).update(granularity="per_channel", axis=-17),
    "whole activation with an axis": lambda m: _activation(m).update(axis=0),
    "whole activation in blocks": lambda m: _activation(m).update(block_size=2),
    "activation in blocks of no size": lambda m: _activation(m).update(BLOCKS),
    "activation in blocks of negative size": lambda m: _activation(m).update(BLOCKS, axis=0, block_size=-1),
    "activation in blocks of size 0": lambda m: _activation(m).update(BLOCKS, block_size=[0, 1]),
    "activation in blocks of no dimension": lambda m: _activation(m).update(BLOCKS, block_size=[]),
    "activation in blocks of another rank": lambda m: _activation(m).update(BLOCKS, block_size=[1, 1, 1]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(copy, name):
    _rewrite(copy, HOSTILE[name])
    with pytest.raises(ArtifactError):
        _read_everything(copy)


@pytest.mark.parametrize("blocks", [{"axis": -1, "block_size": 1}, {"axis": None, "block_size": [-1, 1]}])
def test_blocks_of_activations_are_read_as_they_are_written(copy, blocks):
    """An axis may count from the end, and -1 is a whole dimension."""
    _rewrite(copy, lambda m: _activation(m).update(BLOCKS, **blocks))
    assert len(_read_everything(copy)) == 3


@pytest.mark.parametrize(
    ("found", "twice"),
    [
        ('"tensors": {', '"tensors": {}, "tensors": {'),
        ('"format": "int8"', '"format": "uint8", "format": "int8"'),
        ('"format_version": 1', '"format_version": 1, "format_version": 1'),
    ],
)
def test_keys_that_stand_there_twice_are_refused(copy, found, twice):
    """Two readers could take one or the other for the truth."""
    path = copy / "manifest.json"
    text = path.read_text()
    assert found in text
    text = text.replace(json.loads(text)["digest"], "0" * 64).replace(found, twice, 1)
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))
    with pytest.raises(ArtifactError, match="twice"):
        Artifact.load(copy)


def _exchange(folder, change):
    """Change a tensor file and make the manifest's hash fit."""
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    data = path.read_bytes()

    def update(manifest):
        manifest["files"][0].update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    _rewrite(folder, update)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["0.weight/scale"].fill_(float("nan")),
        lambda t: t["0.weight/scale"].mul_(-1),
        lambda t: t.update({"0.weight/scale": t["0.weight/scale"].double()}),
        lambda t: t.update({"0.weight/codes": t["0.weight/codes"].view(torch.uint8)}),
        lambda t: t.update({"0.weight/codes": t["0.weight/codes"].reshape(16, 8)}),
        lambda t: t.update({"0.weight/more": torch.zeros(1)}),
        lambda t: t.pop("0.bias/values"),
        lambda t: next(v for k, v in t.items() if k.startswith("activations/") and k.endswith("scale")).zero_(),
        lambda t: next(v for k, v in t.items() if k.endswith("/zero_point")).fill_(1000),
    ],
)
def test_hostile_tensors_are_refused(copy, change):
    _exchange(copy, change)
    with pytest.raises(ArtifactError):
        _read_everything(copy)


def test_a_pickle_in_place_of_tensors_is_never_loaded(copy, tmp_path):
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return marker.write_text, ("x",)

    path = next(copy.glob("*.safetensors"))
    path.write_bytes(pickle.dumps(Bomb()))
    data = path.read_bytes()
    _rewrite(copy, lambda m: m["files"][0].update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    with pytest.raises(ArtifactError):
        _read_everything(copy)
    assert not marker.exists()


def test_deeply_nested_json_is_refused(copy):
    (copy / "manifest.json").write_text('{"format":"bitwright-artifact","format_version":1,"x":' + "[" * 200000)
    with pytest.raises(ArtifactError):
        Artifact.load(copy)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files here")
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_no_file_is_not_read(copy, which):
    """A pipe would be waited for, and a device read without end."""
    path = _files(copy)[which]
    for make in (os.mkfifo, os.mkdir, lambda place: os.symlink("/dev/zero", place)):
        path.unlink() if not path.is_dir() else path.rmdir()
        make(path)
        with pytest.raises(ArtifactError, match=path.name):
            Artifact.load(copy)


def test_random_bytes_are_refused(copy):
    rng = random.Random(0)
    for path in _files(copy):
        original = path.read_bytes()
        for size in (0, 1, 8, 100, 5000):
            path.write_bytes(rng.randbytes(size))
            with pytest.raises(ArtifactError):
                _read_everything(copy)
        path.write_bytes(original)


_ODD = (
    None, 0, 1, -1, 2, 3, 8, 1 << 31, 1 << 63, -(1 << 63), 1.5, 1e300, "", "int4", "uint8", "float16", "minval", "zp",
    "dense", "quantized", "palettized", True, False, [], {}, [1], [0, 0], [1 << 40, 1 << 40], "../x", "\0",
)  # fmt: skip


def _mutated(value, rng):
    """A JSON value with one entry somewhere inside changed, left out, doubled or made up."""
    if isinstance(value, dict) and value:
        key, roll = rng.choice(list(value)), rng.random()
        if roll < 0.65:
            value[key] = _mutated(value[key], rng)
        elif roll < 0.75:
            del value[key]
        else:
            value[rng.choice([key, "kept", "zero_point", "dtype", "x"])] = rng.choice([*_ODD, *value.values()])
        return value
    if isinstance(value, list) and value:
        place, roll = rng.randrange(len(value)), rng.random()
        if roll < 0.7:
            value[place] = _mutated(value[place], rng)
        elif roll < 0.8:
            value.append(value[place])
        else:
            value.pop(place)
        return value
    return rng.choice(_ODD)


def _corrupted(data, header, rng):
    """Bytes of a tensor file with a few bits flipped, in its header or behind it."""
    changed, end = bytearray(data), 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice([1, 2, 5])):
        place = rng.randrange(end) if header else rng.randrange(end, len(data))
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _fuzzed(artifact, work, rng, count):
    """Yield what opens of ``count`` changed copies, decoded; everything else must be an error of ours."""
    shutil.copytree(artifact, work)
    tensors = next(work.glob("*.safetensors"))
    manifest, good = (work / "manifest.json").read_text(), tensors.read_bytes()
    for number in range(count):
        changed = json.loads(manifest)
        data = good
        if number % 2:
            changed = _mutated(changed, rng)
        else:
            data = _corrupted(good, number % 4 == 0, rng)
            changed["files"][0].update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        tensors.write_bytes(data)
        (work / "manifest.json").write_text(manifest)
        try:
            _rewrite(work, lambda content, changed=changed: (content.clear(), content.update(changed)))
            loaded = Artifact.load(work)
            decoded = {name: loaded.decode(name) for name in loaded}
        except ArtifactError:
            continue
        assert all(tuple(tensor.shape) == tuple(loaded[name].layout.shape) for name, tensor in decoded.items())
        yield decoded


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)])
def test_random_changes_with_hashes_that_fit(artifact, tmp_path, count):
    """Whoever changes files and hashes gets an error of ours, or tensors of the sizes that the manifest says."""
    for decoded in _fuzzed(artifact, tmp_path / "work", random.Random(count), count):
        assert all(bool(torch.isfinite(tensor).all()) for name, tensor in decoded.items() if name.endswith("weight"))


WEIGHTS = {label: specs for label, kind, specs in SAMPLES if kind == "weight"}


@pytest.mark.parametrize(
    ("label", "count"),
    [
        *(pytest.param(label, 100, marks=pytest.mark.slow) for label in WEIGHTS),
        ("palette of 4 bits, int8 tables", 40),
        ("pruned to 75 %, palette of 4 bits", 40),
    ],
)
def test_random_changes_of_every_kind_of_tensor(label, count, tmp_path):
    """With hashes that fit: an error of ours, or a tensor; one flipped bit without that: always an error."""
    rng = random.Random(label)
    Artifact({"weight": sample_weight(WEIGHTS[label], (32, 32), "float32")}).save(tmp_path / "good")
    for _ in _fuzzed(tmp_path / "good", tmp_path / "work", rng, count):
        pass
    shutil.copytree(tmp_path / "good", tmp_path / "flipped")
    for path in _files(tmp_path / "flipped"):
        data = path.read_bytes()
        for _ in range(count // 4):
            flipped = bytearray(data)
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(ArtifactError):
                _read_everything(tmp_path / "flipped")
        path.write_bytes(data)


def _same_header_other_numbers(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    return bytes(data)


@pytest.mark.parametrize("read_before", [True, False])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("way", ["in place", "replaced", "truncated", "removed"])
def test_files_that_change_after_loading_are_refused(copy, read_before, copied, way):
    """Hashes were compared when the artifact was loaded; a file that is another one since then is not read."""
    loaded = Artifact.load(copy)
    if read_before:
        loaded.decode("0.weight")
    path = next(copy.glob("*.safetensors"))
    changed = path.read_bytes()[:-8] if way == "truncated" else _same_header_other_numbers(path)
    if way == "replaced":
        path.with_suffix(".new").write_bytes(changed)
        os.replace(path.with_suffix(".new"), path)
    elif way == "removed":
        path.unlink()
    else:
        path.write_bytes(changed)
        os.utime(path, (0, 0))  # clocks of files may be coarse
    if copied:
        loaded = pickle.loads(pickle.dumps(loaded))
    for name in loaded:
        with pytest.raises(ArtifactError, match=path.name):
            loaded.decode(name)
