"""Conversion to Core AI and execution by its runtime, for tests."""

from __future__ import annotations

import asyncio
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import ExportedProgram

from bitwright.export.decomposing import decomposed

pytest.importorskip("coreai", reason="needs pip install bitwright[coreai]")
pytest.importorskip("coreai_torch", reason="needs pip install bitwright[coreai]")


def coreai_export(model: torch.nn.Module, *inputs: torch.Tensor, **kwargs: Any) -> ExportedProgram:
    """Export ``model`` and decompose it as Core AI wants it."""
    from coreai_torch import get_decomp_table

    return decomposed(torch.export.export(model.eval(), inputs, **kwargs), get_decomp_table())


def convert(program: ExportedProgram) -> Any:
    """Convert an exported program to a Core AI program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from coreai_torch import TorchConverter

        converter = TorchConverter()
        converter.add_exported_program(program)
        return converter.to_coreai()


def run(program: Any, *inputs: torch.Tensor) -> list[np.ndarray]:
    """Save ``program``, load it, run it, and return its results in order."""
    from coreai.authoring import AIModelAsset
    from coreai.runtime import NDArray

    async def call(path: Path) -> list[np.ndarray]:
        async with AIModelAsset.load(path).executable() as model:
            function = model.load_function("main")
            names = function.desc.input_names
            results = await function(inputs={n: NDArray(x.numpy()) for n, x in zip(names, inputs, strict=True)})
            return [np.array(results[name].numpy()) for name in function.desc.output_names]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.aimodel"
        program.save_asset(path)
        return asyncio.run(call(path))


def asset_bytes(program: Any) -> int:
    """Return the size on disk of the saved program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.aimodel"
        program.save_asset(path)
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def sqnr(reference: np.ndarray, result: np.ndarray) -> float:
    """Return the signal to noise ratio in dB."""
    exact, noisy = reference.astype(np.float64), result.astype(np.float64)
    noise = np.linalg.norm(exact - noisy)
    return float("inf") if noise == 0 else float(20 * np.log10(np.linalg.norm(exact) / noise))
