"""The fidelity report: what compression did to each layer and to the model's output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bitwright._utils.files import write_text_atomically

from .metrics import ErrorMetrics, Histogram, _Report

__all__ = ["ActivationFidelity", "EndToEnd", "FidelityReport", "LayerFidelity", "WeightFidelity"]


class WeightFidelity(_Report):
    """One weight before and after compression.

    Attributes:
        name: dotted name in the float model.
        shape: sizes.
        error: against the float weight; None where it cannot be read any more.
        clipped: share of entries that lie beyond the range of their codes.
        saturated: share of entries at the first or last code, clipped or not.
        zeros: share of entries that are exactly 0 after compression.
        bytes_before: bytes of the float weight.
        bytes_after: bytes in packed form.
        reference: histogram of the float weight.
        compressed: histogram of the compressed weight.
    """

    name: str
    shape: tuple[int, ...]
    error: ErrorMetrics | None = None
    clipped: float | None = None
    saturated: float | None = None
    zeros: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    reference: Histogram | None = None
    compressed: Histogram | None = None


class ActivationFidelity(_Report):
    """One quantized activation, as it was while the compressed model ran.

    Attributes:
        name: where it stands.
        error: of quantizing it, against what entered the quantizer.
        clipped: share of values beyond the range of the codes.
        saturated: share of values at the first or last code, clipped or not.
        values: histogram of what entered.
        range: lowest and highest value that has a code, None where it varies.
    """

    name: str
    error: ErrorMetrics | None = None
    clipped: float | None = None
    saturated: float | None = None
    values: Histogram | None = None
    range: tuple[float, float] | None = None


class LayerFidelity(_Report):
    """One layer.

    Attributes:
        name: module path in eager mode, op name in graph mode; what a configuration matches.
        kind: name of the class, or type of the op.
        module: path of the module that it runs in.
        isolated: error of the layer's output when only this layer is compressed, at the layer.
        output: the same, at the model's output.
        accumulated: error of the layer's output in the compressed model: of this layer and all in front of it.
        broken: what shows that the layer was spoilt, and not merely compressed: a range that does not fit, values in
            other places than before, a channel that drowns the others. One sentence each, that names the tensor.
        damage: key of the ranking: the relative noise that this layer alone adds to the model's output, or the noise
            of channels of its weights that the whole hides (``ErrorMetrics.hidden_noise``), whichever is greater: a
            channel that is far larger than the others dominates the output's SQNR as it does the weight's. Where the
            effect on the output was not measured, the layer's own output counts, and without that its weights. None
            where nothing was measured.
        weights: its weights.
        activations: its quantized activations.
    """

    name: str
    kind: str
    module: str
    isolated: ErrorMetrics | None = None
    output: ErrorMetrics | None = None
    accumulated: ErrorMetrics | None = None
    broken: tuple[str, ...] = ()
    damage: float | None = None
    weights: tuple[WeightFidelity, ...] = ()
    activations: tuple[ActivationFidelity, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of its float weights."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of its weights in packed form."""
        return sum(weight.bytes_after for weight in self.weights)


class EndToEnd(_Report):
    """The outputs of the two models.

    Attributes:
        error: of all floating-point outputs together.
        kl_divergence: mean over rows of KL(softmax of the float output, softmax of the compressed one), in nats, of the
            first output, along its last dimension; None where that has one entry only.
        top1_agreement: share of rows whose largest entry is at the same place; likewise.
        metric_float: mean of the user's metric on the float model.
        metric_compressed: the same on the compressed one.
    """

    error: ErrorMetrics | None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    metric_float: float | None = None
    metric_compressed: float | None = None


class FidelityReport(_Report):
    """What :func:`~bitwright.inspection.compare` returns. Prints as a table.

    Attributes:
        format: name and version of the JSON format.
        mode: ``"eager"`` or ``"graph"``: how the compressed model was run.
        batches: batches of data that were run.
        layers: in order of execution.
        end_to_end: the model's outputs.
        bytes_before: bytes of all parameters and persistent buffers of the float model.
        bytes_after: the same for the compressed one in packed form.
        notes: what could not be measured, and why.
    """

    format: Literal["bitwright.fidelity/1"] = "bitwright.fidelity/1"
    mode: Literal["eager", "graph"]
    batches: int
    layers: tuple[LayerFidelity, ...]
    end_to_end: EndToEnd
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = ()

    @property
    def ranking(self) -> tuple[LayerFidelity, ...]:
        """The layers that are broken, then the others, each by damage, worst first: keep them in higher precision."""
        measured = [layer for layer in self.layers if layer.damage is not None or layer.broken]
        return tuple(sorted(measured, key=lambda layer: (not layer.broken, -(layer.damage or 0.0))))

    def layer(self, name: str) -> LayerFidelity:
        """Return a layer by name.

        Raises:
            KeyError: there is none; lists those there are.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"No layer {name!r} in the report; it has {', '.join(layer.name for layer in self.layers)}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data."""
        return self.model_dump(mode="json")

    def to_json(self, path: str | Path | None = None, indent: int | None = 2) -> str:
        """Return the report as JSON text and write it to ``path``, if one is given."""
        text = json.dumps(self.to_dict(), indent=indent, allow_nan=False) + "\n"
        if path is not None:
            write_text_atomically(path, text)
        return text

    @classmethod
    def from_json(cls, text: str) -> FidelityReport:
        """Read a report from JSON text.

        Raises:
            pydantic.ValidationError: it does not fit the schema.
        """
        return cls.model_validate_json(text)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema (2020-12) of :meth:`to_json`."""
        schema: Mapping[str, Any] = cls.model_json_schema()
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

    def to_html(self, path: str | Path | None = None, title: str = "Fidelity report") -> str:
        """Return the report as one HTML page that needs nothing else, and write it to ``path``, if one is given."""
        from ._html import fidelity_page

        text = fidelity_page(self, title)
        if path is not None:
            write_text_atomically(path, text)
        return text

    def table(self, limit: int | None = None) -> str:
        """Return the ranking and the totals as text.

        Args:
            limit: layers to show at most.
        """
        from ._table import fidelity_table

        return fidelity_table(self, limit)

    def __str__(self) -> str:
        return self.table()
