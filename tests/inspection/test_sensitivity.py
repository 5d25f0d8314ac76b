"""The sweep measures each layer alone, resumes where it was interrupted, and says how long it will take."""

from __future__ import annotations

import copy
from collections import UserDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.inspection import SweepResult, sweep
from bitwright.inspection._fingerprint import fingerprint
from bitwright.palettization import KMeansPalettizerConfig
from bitwright.pruning import MagnitudePrunerConfig
from bitwright.quantization import QuantizationSpec, QuantizerConfig
from bitwright.quantization.config import ModuleQuantizerConfig


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def data() -> list[torch.Tensor]:
    return [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def weights(dtype: str) -> QuantizerConfig:
    spec = QuantizationSpec(dtype=dtype, granularity={"type": "per_channel", "axis": 0})
    module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
    return QuantizerConfig(global_config=module, execution_mode="eager")


CANDIDATES = {"w8": weights("int8"), "w4": weights("int4"), "w2": weights("int2")}


def test_each_entry_is_that_of_the_layer_alone() -> None:
    """Compared with a model in which only this layer's weight is rounded, by hand."""
    model = make()
    result = sweep(model, {"w4": CANDIDATES["w4"]}, data())
    x = torch.cat(data())
    for entry in result.entries:
        twin = copy.deepcopy(model)
        weight = twin.get_submodule(entry.layer).weight
        with torch.no_grad():
            scale = weight.abs().amax(1, keepdim=True) / 7.5
            weight.copy_((weight / scale).round().clamp(-8, 7) * scale)
            reference, output = model(x).double(), twin(x).double()
        expected = 10 * torch.log10(reference.square().sum() / (reference - output).square().sum())
        assert entry.output.error.sqnr_db == pytest.approx(float(expected), abs=0.1)
        numel = weight.numel()
        assert (entry.bytes_before, entry.bytes_after) == (4 * numel, numel // 2 + 4 * len(weight))


def test_fewer_bits_hurt_more_on_every_layer() -> None:
    """SQNR falls from 8 to 4 to 2 bits, and the table has a row per layer."""
    result = sweep(make(), CANDIDATES, data())
    found = {(entry.layer, entry.candidate): entry.output.error.sqnr_db for entry in result.entries}
    assert len(found) == 9
    for layer in ("0", "2", "4"):
        assert found[layer, "w8"] > found[layer, "w4"] > found[layer, "w2"]
    assert found[result.layers[0], "w2"] == min(found.values())
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == list(result.layers)
    assert SweepResult.model_validate_json(result.to_json()) == result


def test_an_interrupted_sweep_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    """Interrupted in the middle of a candidate, and with a line cut off; no layer is measured twice."""
    whole = sweep(make(), CANDIDATES, data())
    store = tmp_path / "sweep.jsonl"
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        if text.startswith("w4: 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(make(), CANDIDATES, data(), store=store, progress=stop)
    with store.open("a") as stream:
        stream.write('{"layer": "2", "cand')
    again: list[str] = []
    resumed = sweep(make(), CANDIDATES, data(), store=store, progress=again.append)
    assert resumed == whole
    measured = [text.split(" (")[0] for text in again]
    assert "w4: 0" not in measured
    assert "w8: compressing" not in measured
    assert "w4: 2" in measured
    assert any("left)" in text for text in again)
    third: list[str] = []
    assert sweep(make(), CANDIDATES, data(), store=store, progress=third.append) == whole
    assert third == []


def test_results_of_another_model_are_not_taken(tmp_path: Path) -> None:
    """The file remembers weights, candidates and data."""
    store = tmp_path / "sweep.jsonl"
    sweep(make(), {"w8": CANDIDATES["w8"]}, data(), store=store)
    other = make()
    with torch.no_grad():
        other[0].weight += 1
    with pytest.raises(ValueError, match="another sweep"):
        sweep(other, {"w8": CANDIDATES["w8"]}, data(), store=store)
    with pytest.raises(ValueError, match="another sweep"):
        sweep(make(), {"w8": CANDIDATES["w4"]}, data(), store=store)
    with pytest.raises(ValueError, match="another sweep"):
        sweep(make(), {"w8": CANDIDATES["w8"]}, data()[:1], store=store)


def test_results_of_another_sweep_of_the_same_weights_are_not_taken(tmp_path: Path) -> None:
    """The file remembers the kinds of layers, calibration, the metric, and batches that are no plain dict."""
    store, candidates = tmp_path / "sweep.jsonl", {"w8": CANDIDATES["w8"]}
    batches = [UserDict(input=x) for x in data()]

    def positive(output: torch.Tensor, batch: Any) -> float:
        return float((output > 0).double().mean())

    def again(**changed: Any) -> SweepResult:
        options = {"model": make(), "candidates": candidates, "data": batches, "store": store} | changed
        return sweep(**options)

    first = again()
    assert again() == first
    other = make()
    other[1] = nn.Tanh()
    later = [UserDict(input=x.clone()) for x in data()]
    later[0]["input"][8, 8] += 1  # where a tensor that is printed shows nothing
    for changed in ({"model": other}, {"calibration": data()[:1]}, {"metric": positive}, {"data": later}):
        with pytest.raises(ValueError, match="another sweep"):
            again(**changed)


@pytest.mark.parametrize("content", [b"notes\nwithout an end", b"[1]\n", b'{"a": 1}\n', b"\x00\xff\n\x00"])
def test_files_of_others_stay_as_they_are(content: bytes, tmp_path: Path) -> None:
    """The error names the file."""
    store = tmp_path / "notes.txt"
    store.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.txt' exists and does not hold the results of a sweep"):
        sweep(make(), CANDIDATES, data(), store=store)
    assert store.read_bytes() == content


def test_states_that_are_no_plain_tensors(tmp_path: Path) -> None:
    """Extra state may be anything, and buffers may be sparse; both belong to what the file remembers."""

    class Odd(nn.Module):
        def __init__(self, extra: int) -> None:
            super().__init__()
            self.linear, self.extra = nn.Linear(16, 4), extra
            self.register_buffer("adjacency", torch.eye(16).to_sparse())

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    torch.manual_seed(0)
    model, other = Odd(1).eval(), Odd(2).eval()
    store = tmp_path / "sweep.jsonl"
    entry = sweep(model, {"w8": CANDIDATES["w8"]}, data(), store=store).entries[0]
    assert (entry.bytes_before, entry.bytes_after) == (256, 80)
    other.linear = model.linear
    with pytest.raises(ValueError, match="another sweep"):
        sweep(other, {"w8": CANDIDATES["w8"]}, data(), store=store)


def test_tied_weights_have_their_size_under_each_name() -> None:
    """Both layers compute with the packed weight."""

    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False)).eval()
    model[2].weight = model[0].weight
    entries = sweep(model, {"w8": CANDIDATES["w8"]}, data()).entries
    assert [(entry.layer, entry.bytes_after) for entry in entries] == [("0", 320), ("2", 320)]


def test_other_techniques_graph_mode_and_a_metric() -> None:
    """Palettes and pruning can be candidates; graph mode names ops; the metric is in every entry."""
    candidates = {
        "w8a8": QuantizerConfig.presets.w8a8(),
        "palette": KMeansPalettizerConfig(),
        "pruned": MagnitudePrunerConfig(),
    }
    result = sweep(make(), candidates, data(), metric=lambda output, _: float(output.abs().mean()))
    names = {c: {e.layer for e in result.entries if e.candidate == c} for c in result.candidates}
    assert names == {"w8a8": {"linear", "linear_1", "linear_2"}, "palette": {"0", "2", "4"}, "pruned": {"0", "2", "4"}}
    assert all(entry.output.metric_compressed is not None for entry in result.entries)


def test_programs_of_torch_export_are_swept() -> None:
    """They cannot be switched to eval mode and are left in the mode that they were captured in."""
    program = torch.export.export(make(), (data()[0],)).module()
    result = sweep(program, {"w4": QuantizerConfig.presets.w4()}, data())
    assert set(result.layers) == {"linear", "linear_1", "linear_2"}
    same = sweep(make(), {"w4": QuantizerConfig.presets.w4()}, data())
    assert [e.output for e in result.entries] == [e.output for e in same.entries]
    assert result.table().startswith("SQNR of the output in dB, one layer compressed\n")


def test_nothing_to_sweep() -> None:
    """The errors say what is missing."""
    with pytest.raises(ValueError, match="at least one candidate"):
        sweep(make(), {}, data())
    with pytest.raises(ValueError, match="data is empty"):
        sweep(make(), CANDIDATES, [])
    for wrong in ("w8", [CANDIDATES["w8"]], {"w8": "preset:w8"}):
        with pytest.raises(TypeError, match="dict from names to configurations"):
            sweep(make(), wrong, data())  # type: ignore[arg-type]


def test_metrics_are_known_by_what_they_do(tmp_path: Path) -> None:
    """Two functions of one name are two metrics; one that was made again, or counts its calls, is the same."""

    def scaled(factor: float) -> Any:
        calls: list[int] = []

        def metric(output: Any, _: Any, tags: Any = None) -> float:
            calls.append(1)
            return factor * len(tags or {"a", "b"}) if output is not None else metric(output, _)

        return metric

    store, candidates = tmp_path / "sweep.jsonl", {"w8": CANDIDATES["w8"]}
    first = sweep(make(), candidates, data(), store=store, metric=scaled(1.0))
    assert sweep(make(), candidates, data(), store=store, metric=scaled(1.0)) == first
    lambdas = [lambda output, _: 1.0, lambda output, _: 2.0]
    for other in (scaled(2.0), partial(scaled(1.0), tags=[1]), *lambdas):
        with pytest.raises(ValueError, match="another sweep"):
            sweep(make(), candidates, data(), store=store, metric=other)
    prints = [fingerprint(make(), {}, [], [], metric) for metric in lambdas]
    assert prints[0] != prints[1]
