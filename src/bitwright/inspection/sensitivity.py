"""Sensitivity sweep: what each candidate configuration does to each layer alone."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bitwright.config import CompressionConfig
from bitwright.program.export_errors import blaming_inputs
from bitwright.program.states import states_preserved

from ._batches import batches_of, example_of, inputs_of
from ._end_to_end import OutputStatistics
from ._fingerprint import fingerprint
from ._probe import LayerSite, PairProbe, kept
from ._sizes import stored_sizes
from .applying import apply_configs
from .fidelity import Metric, Progress, evaluating, make_probe, under_all_names
from .metrics import SQNR_LIMIT_DB, _Report
from .report import EndToEnd

__all__ = ["SweepEntry", "SweepResult", "sweep"]


class SweepEntry(_Report):
    """One layer under one candidate, everything else in floating point.

    Attributes:
        layer: name of the layer.
        candidate: name of the configuration.
        output: the model's output against the float model's.
        bytes_before: bytes of the layer's weights.
        bytes_after: the same in packed form.
    """

    layer: str
    candidate: str
    output: EndToEnd
    bytes_before: int
    bytes_after: int


class SweepResult(_Report):
    """What :func:`~bitwright.inspection.sweep` returns. Prints as a table.

    Attributes:
        format: name and version of the JSON format.
        entries: one for each layer and candidate.
    """

    format: Literal["bitwright.sweep/1"] = "bitwright.sweep/1"
    entries: tuple[SweepEntry, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, the most sensitive first: by the worst SQNR that a candidate gives."""
        worst: dict[str, float] = {}
        for entry in self.entries:
            error = entry.output.error
            value = error.sqnr_db if error is not None else SQNR_LIMIT_DB  # it was not measured, so it comes last
            worst[entry.layer] = min(value, worst.get(entry.layer, value))
        return tuple(sorted(worst, key=lambda name: worst[name]))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the candidates."""
        return tuple(dict.fromkeys(entry.candidate for entry in self.entries))

    def to_json(self, indent: int | None = 2) -> str:
        """Return the result as JSON text."""
        return json.dumps(self.model_dump(mode="json"), indent=indent, allow_nan=False) + "\n"

    def table(self) -> str:
        """Return the output's SQNR for each layer and candidate as text."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        found = {(entry.layer, entry.candidate): entry.output.error for entry in self.entries}
        table = Table(box=box.SIMPLE)
        table.add_column("layer")
        for candidate in self.candidates:
            table.add_column(candidate, justify="right")
        for layer in self.layers:
            errors = [found.get((layer, candidate)) for candidate in self.candidates]
            cells = ["-" if error is None else f"{error.sqnr_db:.1f}" for error in errors]
            table.add_row(*map(Text, (layer or "<root>", *cells)))
        console = Console(width=150, record=True, file=io.StringIO())
        console.print("SQNR of the output in dB, one layer compressed", table)
        return "\n".join(line.rstrip() for line in console.export_text().strip().splitlines())

    def __str__(self) -> str:
        return self.table()


def sweep(
    model: nn.Module,
    candidates: Mapping[str, CompressionConfig[Any]],
    data: Iterable[Any],
    *,
    calibration: Iterable[Any] | None = None,
    metric: Metric | None = None,
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Measure each candidate on each layer alone.

    The model is compressed once per candidate; then one layer at a time takes the place of the float one. Results are
    written to ``store`` as they come; a later call with the same model, candidates, data, calibration and metric goes
    on where this one was interrupted.

    Args:
        model: the float model; it is not changed.
        candidates: configurations by name.
        data: batches to measure on, as for :func:`~bitwright.inspection.compare`; they are kept, so give few.
        calibration: batches to calibrate with; ``data`` if None.
        metric: number for an output and its batch.
        store: file for results, one JSON line each; made if it does not exist.
        progress: called with what is being done, and an estimate of the time left.

    Raises:
        TypeError: ``candidates`` is no mapping from names to configurations.
        ValueError: ``candidates`` or ``data`` is empty, ``store`` belongs to another sweep or is no sweep's file, the
            metric is not finite, or in graph mode, forward fixes a size that differs among batches.
        PlanError: a candidate cannot be applied.
    """
    if not isinstance(candidates, Mapping) or not all(isinstance(c, CompressionConfig) for c in candidates.values()):
        raise TypeError(
            "candidates must be a dict from names to configurations, for example "
            f"{{'w8': QuantizerConfig.presets.w8(execution_mode='eager')}}; got {candidates!r:.200}."
        )
    if not candidates:
        raise ValueError("There is nothing to sweep: give at least one candidate configuration.")
    batches = list(batches_of(data))
    calibrating = batches if calibration is None else list(batches_of(calibration))
    done = _Store(store, "" if store is None else fingerprint(model, candidates, batches, calibrating, metric))
    clock = _Clock(len(candidates), progress or (lambda _: None))
    entries: list[SweepEntry] = []
    with evaluating(model), torch.no_grad():
        with states_preserved(model):
            references = [kept(_run(model, batch)) for batch in batches]
        for name, config in candidates.items():
            if done.is_complete(name):
                entries += done.of(name)
                clock.skip_candidate()
                continue
            clock.say(f"{name}: compressing")
            applied = apply_configs(model, [config], calibrating, shapes_of=batches)
            probe = make_probe(model, applied.model, example_of(batches, model))
            sizes = under_all_names({size.name: size.nbytes for size in stored_sizes(applied.model)}, model)
            sites = [site for site in probe.layers if site.can_substitute]
            clock.begin(len(sites))
            for site in sites:
                entry = done.get(name, site.name)
                if entry is None:
                    clock.say(f"{name}: {site.name}")
                    with states_preserved(model), states_preserved(applied.model, model):
                        outputs = _measure(probe, site, model, batches, references, metric)
                    entry = _entry(site, name, outputs, model, sizes)
                    done.add(entry)
                    clock.step()
                else:
                    clock.skip()
                entries.append(entry)
            done.complete(name)
    return SweepResult(entries=tuple(entries))


def _run(model: nn.Module, batch: Any) -> Any:
    inputs = inputs_of(batch, model).copied()
    with blaming_inputs(model, inputs.args, inputs.kwargs):
        return model(*inputs.args, **inputs.kwargs)


def _measure(
    probe: PairProbe,
    site: LayerSite,
    model: nn.Module,
    batches: list[Any],
    references: list[Any],
    metric: Metric | None,
) -> EndToEnd:
    statistics = OutputStatistics(metric)
    for batch, reference in zip(batches, references, strict=True):
        output = probe.run_with_only(site, inputs_of(batch, model))
        if output is not None:
            statistics.add(reference, output, batch)
    return statistics.result()


def _entry(site: LayerSite, name: str, output: EndToEnd, model: nn.Module, after: Mapping[str, int]) -> SweepEntry:
    state = model.state_dict()  # extra state may be anything
    tensors = {weight: state[weight] for weight in site.weights if isinstance(state.get(weight), torch.Tensor)}
    before = {weight: tensor.numel() * tensor.element_size() for weight, tensor in tensors.items()}
    return SweepEntry(
        layer=site.name,
        candidate=name,
        output=output,
        bytes_before=sum(before.values()),
        bytes_after=sum(after.get(weight, size) for weight, size in before.items()),
    )


class _Store:
    """Results in a file, one line each; a line that was cut off is ignored."""

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self.path = None if path is None else Path(path)
        self.entries: dict[tuple[str, str], SweepEntry] = {}
        self.completed: set[str] = set()
        if self.path is None:
            return
        lines = self._lines(fingerprint)
        for line in lines[1:]:
            if "completed" in line:
                self.completed.add(line["completed"])
            else:
                entry = SweepEntry.model_validate(line)
                self.entries[entry.candidate, entry.layer] = entry
        if not lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("")
            self._append({"fingerprint": fingerprint})

    def get(self, candidate: str, layer: str) -> SweepEntry | None:
        return self.entries.get((candidate, layer))

    def of(self, candidate: str) -> list[SweepEntry]:
        return [entry for (name, _), entry in self.entries.items() if name == candidate]

    def is_complete(self, candidate: str) -> bool:
        return candidate in self.completed

    def add(self, entry: SweepEntry) -> None:
        self._append(entry.model_dump(mode="json"))

    def complete(self, candidate: str) -> None:
        self._append({"completed": candidate})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, allow_nan=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _lines(self, fingerprint: str) -> list[dict[str, Any]]:
        """Return the lines that are whole, and cut off what is not, so that new lines begin at a line's start.

        Raises:
            ValueError: the file is no sweep's, or another sweep's; it is left as it is.
        """
        assert self.path is not None
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return []
        found = _fingerprint_in(content.partition(b"\n")[0])
        if found is None:
            raise ValueError(f"{str(self.path)!r} exists and does not hold the results of a sweep; give another file.")
        if found != fingerprint:
            raise ValueError(
                f"{str(self.path)!r} holds the results of another sweep: the model or its weights, a candidate, the "
                "data, the calibration or the metric differ. Give another file, or delete this one."
            )
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as stream:
                stream.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]


def _fingerprint_in(line: bytes) -> str | None:
    """Return the fingerprint that a sweep's file begins with; None for any other line."""
    try:
        header = json.loads(line)
    except ValueError:
        return None
    found = header.get("fingerprint") if isinstance(header, dict) else None
    return found if isinstance(found, str) else None


class _Clock:
    """Says how far a sweep is and how long it may still take."""

    def __init__(self, candidates: int, progress: Progress) -> None:
        self.progress = progress
        self.candidates = candidates
        self.layers = 0
        self.left = 0
        self.measured = 0
        self.start = time.monotonic()

    def begin(self, layers: int) -> None:
        self.layers = self.left = layers
        self.candidates -= 1

    def skip_candidate(self) -> None:
        self.candidates -= 1

    def skip(self) -> None:
        self.left -= 1

    def step(self) -> None:
        self.left -= 1
        self.measured += 1

    def say(self, text: str) -> None:
        if self.measured:
            remaining = self.left + self.candidates * self.layers
            seconds = (time.monotonic() - self.start) / self.measured * remaining
            text = f"{text} (about {_duration(seconds)} left)"
        self.progress(text)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
