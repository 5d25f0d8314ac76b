"""The HTML page of the fidelity report needs nothing else, and works in a browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.inspection import FidelityReport, compare
from bitwright.quantization import Quantizer, QuantizerConfig


class Named(nn.Module):
    """A module whose path would end a script element, if it were not escaped."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</script><b>", nn.Linear(8, 8))
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._modules["</script><b>"]
        assert inner is not None
        return self.last(torch.relu(self.first(inner(x))))


@pytest.fixture(scope="module")
def report() -> FidelityReport:
    torch.manual_seed(0)
    model = Named().eval()
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w8a8(execution_mode="eager"))
    prepared = quantizer.prepare((torch.randn(4, 8),))
    with quantizer.calibration_mode():
        prepared(torch.randn(4, 8))
    return compare(model, prepared, [torch.randn(16, 8)])


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.found += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href", "action", "data")]


def test_page_refers_to_nothing_outside(report: FidelityReport, tmp_path: Path) -> None:
    """No link, script or image from elsewhere; a content security policy forbids requests altogether."""
    text = report.to_html(tmp_path / "report.html", title="<Mine> & yours")
    links = _Links()
    links.feed(text)
    assert links.found == []
    assert links.scripts == 2
    outside = set(re.findall(r"https?://[^\"'\s<]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert "default-src 'none'" in text
    assert "<title>&lt;Mine&gt; &amp; yours</title>" in text
    assert (tmp_path / "report.html").read_text() == text


def test_a_title_is_a_title(report: FidelityReport) -> None:
    """Whatever it is called, the data stands in the page once."""
    page = report.to_html(title="<b> {{data}} {{title}}")
    assert page.count("bitwright.fidelity/1") == 1
    assert page.count("&lt;b&gt; {{data}} {{title}}") == 2


def test_page_holds_the_whole_report(report: FidelityReport) -> None:
    """What stands in the page is the JSON of the report, whatever the names are."""
    text = report.to_html()
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    assert FidelityReport.from_json(match[1]) == report
    assert any("</script>" in layer.name for layer in report.layers)


_CHECK = """
<script>
window.addEventListener("load", () => {
  const names = () => [...document.querySelectorAll("#layers tbody tr")].map(r => r.cells[0].textContent);
  const before = names();
  document.querySelector("#layers th button").click();
  const up = names();
  document.querySelector("#layers th button").click();
  const down = names();
  const state = { before, up, down, figures: document.querySelectorAll("figure svg rect").length,
    bars: document.querySelectorAll("#chart rect").length, errors: window.failures,
    requests: performance.getEntriesByType("resource").map(e => e.name) };
  const out = document.createElement("pre");
  out.id = "state";
  out.textContent = "STATE" + JSON.stringify(state) + "END";
  document.body.append(out);
});
</script>
"""
_GUARD = (
    '<script>window.failures = []; window.addEventListener("error", e => window.failures.push(e.message));</script>'
)


def _chromium(*arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--window-size=1200,1400"]
    done = subprocess.run([program, *options, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.slow
def test_page_sorts_in_a_browser_without_errors_or_requests(report: FidelityReport, tmp_path: Path) -> None:
    """Chromium runs the page: the table is sorted by damage at first, by name after a click, reversed by another."""
    page = report.to_html().replace("<head>", "<head>" + _GUARD, 1).replace("</body>", _CHECK + "</body>")
    path = tmp_path / "page.html"
    path.write_text(page)
    dumped = _chromium("--dump-dom", path.as_uri())
    match = re.search(r'id="state">STATE(.*)END</pre>', dumped)
    assert match is not None
    state = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    ranked = [layer.name for layer in report.ranking]
    assert state["before"][: len(ranked)] == ranked
    assert state["up"] == sorted(state["before"])
    assert state["down"] == sorted(state["before"], reverse=True)
    assert state["errors"] == []
    assert state["requests"] == []
    assert state["figures"] > 10
    assert state["bars"] >= len(ranked)


@pytest.mark.slow
def test_screenshot_is_not_blank(report: FidelityReport, tmp_path: Path) -> None:
    """The picture that Chromium takes has the colours of chart and histograms in it."""
    report.to_html(tmp_path / "report.html")
    picture = tmp_path / "report.png"
    _chromium(f"--screenshot={picture}", (tmp_path / "report.html").as_uri())
    pixels = _pixels(picture.read_bytes())
    colours, counts = pixels.reshape(-1, pixels.shape[-1])[:, :3].unique(dim=0, return_counts=True)
    shades = {tuple(colour) for colour in colours[counts > 50].tolist()}
    assert {(0x2F, 0x6F, 0xB7), (0xD0, 0x7A, 0x1F)} <= shades
    assert len(shades) > 5


def _pixels(png: bytes) -> torch.Tensor:
    """Decode a PNG of 8-bit RGB or RGBA without interlacing (PNG specification, section 9)."""
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[kind]
    packed, place = b"", 8
    while place < len(png):
        length, name = struct.unpack(">I4s", png[place : place + 8])
        packed += png[place + 8 : place + 8 + length] if name == b"IDAT" else b""
        place += length + 12
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    rows = np.zeros((height + 1, width + 1, channels), np.int64)
    for y in range(height):
        line, up = raw[y, 1:].reshape(width, channels).astype(np.int64), rows[y]
        for x in range(width) if raw[y, 0] in (1, 3, 4) else ():
            left, above, corner = rows[y + 1, x], up[x + 1], up[x]
            rows[y + 1, x + 1] = (line[x] + _predicted(raw[y, 0], left, above, corner)) % 256
        if raw[y, 0] in (0, 2):
            rows[y + 1, 1:] = (line + (up[1:] if raw[y, 0] == 2 else 0)) % 256
    return torch.from_numpy(rows[1:, 1:])


def _predicted(kind: int, left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    if kind == 1:
        return left
    if kind == 3:
        return (left + above) // 2
    estimate = left + above - corner
    near = [np.abs(estimate - value) for value in (left, above, corner)]
    return np.where((near[0] <= near[1]) & (near[0] <= near[2]), left, np.where(near[1] <= near[2], above, corner))
