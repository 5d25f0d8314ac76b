"""Pages and pictures that the site makes of the code itself."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).parent


def on_files(files: Any, config: Any) -> Any:
    """Add the generated files to the site."""
    from mkdocs.structure.files import File

    for name, content in {**pages(), **pictures(), **schemas()}.items():
        files.append(File.generated(config, name, content=content))
    return files


def pages() -> dict[str, str]:
    """Return the generated pages by path."""
    return {
        "diagnostics.md": diagnostics(),
        "capabilities.md": capabilities(),
        "performance.md": _load("performance").page(),
    }


def schemas() -> dict[str, str]:
    """Return the JSON schemas that the site publishes, by path."""
    from bitwright.cli.loading import recipe_schema
    from bitwright.inspection import FidelityReport

    found = {"recipe": recipe_schema(), "fidelity": FidelityReport.json_schema()}
    return {f"schema/{name}.json": json.dumps(schema, indent=2) + "\n" for name, schema in found.items()}


def pictures() -> dict[str, str]:
    """Return the pictures by path."""
    drawn = {name: make() for name, make in _load("pictures").PICTURES.items()}
    return {f"pictures/{name}.svg": text for name, text in {**drawn, **_load("performance").charts()}.items()}


def diagnostics() -> str:
    """All pages of ``bitwright explain``, one below the other."""
    from bitwright.inspection import diagnostics as known

    parts = ["# Diagnostics\n\n`bitwright explain CODE` prints these pages.\n"]
    for diagnostic in known().values():
        body = diagnostic.page.replace("\n## ", "\n### ")
        parts.append("#" + body)
    return "\n".join(parts)


@functools.cache
def capabilities() -> str:
    """What each target makes of typical specs, asked of the exporters' own checks."""
    from bitwright.export.capabilities import capabilities as rows_of

    rows = list(rows_of())
    targets = list(rows[0].targets)
    lines = [
        "# Capabilities",
        "",
        "What each target holds, as the exporters' own checks answer for a linear layer of 64 × 64. *packed*: in its",
        "quantized types; *arithmetic*: as plain operators, as exact, but neither smaller nor faster; *dense*: decoded",
        "values in floating point; *no*: refused before anything is written.",
        "`bitwright plan … --target onnx` says it for your own model.",
    ]
    for kind in ("weight", "activation"):
        lines += [
            "",
            f"## {kind.capitalize()}s",
            "",
            f"| {kind} | {' | '.join(targets)} |",
            "|---" * (len(targets) + 1) + "|",
        ]
        for row in rows:
            if row.kind == kind:
                cells = [_SHOWN.get(str(row.targets[name].form), str(row.targets[name].form)) for name in targets]
                lines.append(f"| {row.label} | {' | '.join(cells)} |")
    lines += ["", "## Why not", ""]
    for name in targets:
        reasons = dict.fromkeys(row.targets[name].reason.partition(";")[0] for row in rows)
        listed = [f"    * {reason}" for reason in reasons if reason]
        lines += [f"* {name}", *listed] if listed else []
    lines += [
        "",
        "## Techniques",
        "",
        "| technique | eager mode | graph mode | training |",
        "|---|---|---|---|",
        "| quantization of weights | yes | yes | yes |",
        "| quantization of activations | yes | yes | yes |",
        "| palettization | yes | | yes |",
        "| pruning | yes | | yes |",
        "",
    ]
    return "\n".join(lines)


_SHOWN = {"refused": "no"}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bitwright_docs_{name}", _HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
