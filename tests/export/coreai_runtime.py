"""Convert a finalized model with coreai-torch and run it in the Core AI runtime."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

from bitwright.export.decomposing import decomposed


def converted(model, args):
    """The Core AI program of a model and the exported program that it came from."""
    import coreai_torch

    with torch.no_grad():
        program = torch.export.export(model.eval(), args)
        program = decomposed(program, coreai_torch.get_decomp_table())
    converter = coreai_torch.TorchConverter()
    converter.add_exported_program(program)
    return converter.to_coreai(), program


def run(program, args):
    """Outputs of one call in the runtime, and the bytes of the saved model."""
    return asyncio.run(_run(program, args))


async def _run(program, args):
    from coreai.runtime import NDArray

    with tempfile.TemporaryDirectory(suffix=".aimodel") as folder:
        asset = program.save_asset(Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        async with asset.executable() as model:
            function = model.load_function("main")
            inputs = {
                name: NDArray(value.contiguous()) for name, value in zip(function.desc.input_names, args, strict=True)
            }
            outputs = await function(inputs=inputs)
            return [torch.from_dlpack(value._tensor.to_dlpack()).clone() for value in outputs.values()], size


def coreai_ops(program):
    """How often each of Core AI's compression ops is called in an exported program."""
    counts = {}
    for node in program.graph.nodes:
        name = node.target.name() if hasattr(node.target, "name") else ""
        if name.startswith("coreai::"):
            counts[name.removeprefix("coreai::")] = counts.get(name.removeprefix("coreai::"), 0) + 1
    return counts
