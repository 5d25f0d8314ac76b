"""Pages and pictures that the site makes of the code itself."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_HERE = Path(__file__).parent


def on_files(files: Any, config: Any) -> Any:
    """Add the generated files to the site."""
    from mkdocs.structure.files import File

    for name, content in {**pages(), **pictures()}.items():
        files.append(File.generated(config, name, content=content))
    return files


def pages() -> dict[str, str]:
    """Return the generated pages by path."""
    return {"diagnostics.md": diagnostics(), "capabilities.md": capabilities(), "performance.md": performance()}


def pictures() -> dict[str, str]:
    """Return the pictures by path."""
    module = _load("pictures")
    return {f"pictures/{name}.svg": make() for name, make in module.PICTURES.items()}


def diagnostics() -> str:
    """All pages of ``bitwright explain``, one below the other."""
    from bitwright.inspection import diagnostics as known

    parts = ["# Diagnostics\n\n`bitwright explain CODE` prints these pages.\n"]
    for diagnostic in known().values():
        body = diagnostic.page.replace("\n## ", "\n### ")
        parts.append("#" + body)
    return "\n".join(parts)


def capabilities() -> str:
    """Which number formats of weights a target holds, asked of the exporters themselves."""
    lines = [
        "# Capabilities",
        "",
        "What each target holds, as the exporters' own checks answer for a weight of 64 × 64.",
        "",
        "| weight | simulation | artifact | Core AI | Core ML |",
        "|---|---|---|---|---|",
    ]
    for label, tensor in _examples():
        lines.append(f"| {label} | yes | yes | {_coreai(tensor)} | {_coreml(tensor)} |")
    lines += [
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


def performance() -> str:
    """The newest results of the benchmarks."""
    results = sorted((_HERE.parents[1] / "benchmarks" / "results").glob("*.json"))
    lines = ["# Performance", "", "Made by `make bench`; ratios of medians within one run on one machine.", ""]
    if not results:
        lines.append("There are no results in this tree. Run `make bench`, then build the site again.")
    for path in results:
        lines += [f"## {path.stem}", "", "```json", json.dumps(json.loads(path.read_text()), indent=2), "```", ""]
    return "\n".join(lines) + "\n"


def _examples() -> list[tuple[str, Any]]:
    from bitwright.artifact import Artifact
    from bitwright.palettization import KMeansPalettizer, KMeansPalettizerConfig
    from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig

    torch.manual_seed(0)
    found = []
    for dtype in ("int8", "uint8", "int4", "uint4", "int3", "int2", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"):
        blocks = {"type": "per_block", "axis": -1, "block_size": 32}
        is_fp4 = dtype.startswith("float4")
        granularity = blocks if is_fp4 else {"type": "per_channel", "axis": 0}
        fields = {"scale_dtype": "float8_e8m0fnu"} if is_fp4 else {}
        spec = QuantizationSpec(dtype=dtype, granularity=granularity, **fields)
        module = ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec})
        config = QuantizerConfig(global_config=module, execution_mode="eager")
        prepared = Quantizer(torch.nn.Linear(64, 64), config).prepare((torch.zeros(1, 64),))
        label = f"{dtype}, blocks of 32, power-of-two scales" if is_fp4 else f"{dtype}, per channel"
        found.append((label, Artifact.from_model(prepared)["weight"]))
    for bits in ("w4", "w6"):
        config = getattr(KMeansPalettizerConfig.presets, bits)()
        prepared = KMeansPalettizer(torch.nn.Linear(64, 64), config).prepare((torch.zeros(1, 64),))
        found.append((f"palette of {bits[1:]} bits", Artifact.from_model(prepared)["weight"]))
    return found


def _coreai(tensor: Any) -> str:
    from bitwright.export.coreai_weights import unsupported_weight

    problem = unsupported_weight(tensor)
    return "yes" if problem is None else f"no: {problem}"


def _coreml(tensor: Any) -> str:
    from bitwright.common import CoreMLExportError
    from bitwright.export.coreml_weights import check_weight

    try:
        check_weight(tensor, "weight")
    except CoreMLExportError:
        return "no"
    return "yes"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bitwright_docs_{name}", _HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
