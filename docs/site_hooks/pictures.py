"""Pictures of the concepts, computed with Bitwright and written as SVG."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bitwright.formats import format_of
from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.quantization import QuantizationSpec
from bitwright.quantization.spec import QuantizationComponentFactory

__all__ = ["PICTURES"]

_WIDTH, _HEIGHT = 640, 220
_BLUE, _ORANGE, _GREY = "#2f6fb7", "#d07a1f", "#8a94a0"


def _svg(parts: list[str], height: int = _HEIGHT) -> str:
    style = "font: 12px system-ui, sans-serif; fill: #8a94a0"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<style>text {{ {style} }}</style>\n{body}\n</svg>\n"
    )


def _line(points: list[tuple[float, float]], color: str, width: float = 1.5) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _fake_quantize(tensor: torch.Tensor, **fields: object) -> torch.Tensor:
    from bitwright.config.spec import CompressionTargetTensor

    spec = QuantizationSpec(**fields)
    simulator = QuantizationComponentFactory.create_fake_quantizer(spec, CompressionTargetTensor.WEIGHT)
    with torch.no_grad():
        result: torch.Tensor = simulator(tensor)
    return result


def staircase() -> str:
    """A 3-bit quantizer: what goes in, what comes out."""
    x = torch.linspace(-1, 1, 641)
    y = _fake_quantize(x, dtype="int3", granularity={"type": "per_tensor"})
    at = lambda a, b: (320 + 240 * float(a), 110 - 90 * float(b))  # noqa: E731
    parts = [
        _line([at(-1, -1), at(1, 1)], _GREY, 1),
        _line([at(a, b) for a, b in zip(x, y, strict=True)], _BLUE, 2),
        _text(570, 26, "out", "end"),
        _text(60, 210, "few values remain of a continuum; the distance to the grey line is the error"),
    ]
    return _svg(parts)


def number_lines() -> str:
    """The values of four 4-bit number systems on one line each."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    rows: list[tuple[str, list[float]]] = []
    for label, name in (("int4", "int4"), ("fp4 (e2m1)", "float4_e2m1fn_x2")):
        fmt = format_of(name)
        if fmt.kind == "int":
            values = [float(v) for v in range(int(fmt.minimum), int(fmt.maximum) + 1)]
        else:
            values = sorted({s * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for s in (1.0, -1.0)})
        most = max(map(abs, values))
        rows.append((label, [v / most for v in values]))
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.weight.data = weight
    spec = PalettizationSpec(n_bits=4)
    config = KMeansPalettizerConfig(global_config=ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}))
    palettized = KMeansPalettizer(layer, config).prepare((torch.zeros(1, 64),))
    values = palettized.weight.detach().unique()
    rows.append(("palette of 16, learnt", [float(v) for v in values / values.abs().max()]))
    parts = []
    for number, (label, positions) in enumerate(rows):
        y = 50 + 60 * number
        parts.append(_line([(180, y), (620, y)], _GREY, 1))
        parts.append(_text(10, y + 4, label))
        parts += [f'<circle cx="{400 + 210 * p:.1f}" cy="{y}" r="4" fill="{_BLUE}"/>' for p in positions]
    return _svg(parts)


def granularity() -> str:
    """Relative error of int4 on a weight whose rows differ in size, by granularity."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * torch.logspace(-1.5, 0.5, 64).unsqueeze(1)
    choices: list[tuple[str, dict[str, object]]] = [
        ("per_tensor", {"type": "per_tensor"}),
        ("per_channel", {"type": "per_channel", "axis": 0}),
        ("per_block, 32", {"type": "per_block", "axis": 1, "block_size": 32}),
    ]
    parts = []
    for number, (label, choice) in enumerate(choices):
        result = _fake_quantize(weight, dtype="int4", granularity=choice)
        rows = (result - weight).square().sum(1) / weight.square().sum(1)
        share = float(rows.mean())
        y = 40 + 55 * number
        parts.append(_text(10, y + 16, label))
        parts.append(f'<rect x="150" y="{y}" width="{max(1.0, 380 * share):.1f}" height="22" fill="{_ORANGE}"/>')
        parts.append(_text(158 + 380 * share, y + 16, f"{share:.2%} of a row's power is noise"))
    return _svg(parts)


def ranges() -> str:
    """Error of an int8 activation against where the range is cut."""
    torch.manual_seed(0)
    x = torch.distributions.StudentT(3.0).sample((200_000,))
    most = float(x.abs().max())
    cuts = torch.logspace(0, torch.log10(torch.tensor(most)), 60)
    points = []
    for cut in cuts:
        scale = float(cut) / 127.5
        rounded = (x / scale).round().clamp(-128, 127) * scale
        error = 10 * torch.log10(x.square().mean() / (rounded - x).square().mean())
        points.append((float(torch.log(cut)), float(error)))
    low, high = points[0][0], points[-1][0]
    top = max(value for _, value in points)
    at = [(60 + 540 * (a - low) / (high - low), 190 - 160 * max(0.0, b) / top) for a, b in points]
    parts = [
        _line(at, _BLUE, 2),
        _text(60, 212, "narrow range: values are clipped"),
        _text(620, 212, "wide range: steps are coarse", "end"),
        _text(60, 20, f"SQNR; the best of this data is {top:.1f} dB"),
    ]
    return _svg(parts)


PICTURES: dict[str, Callable[[], str]] = {
    "staircase": staircase,
    "number_lines": number_lines,
    "granularity": granularity,
    "ranges": ranges,
}
