"""Data flows one way: no stage imports from one to its right (``docs/design.md``)."""

from __future__ import annotations

from .source_imports import imports, modules

STAGES = (
    ("bitwright.errors", "bitwright.common"),
    ("bitwright.formats",),
    ("bitwright.kernels",),
    ("bitwright.config", "bitwright._utils"),
    tuple(
        f"bitwright.{name}.{part}"
        for name in ("quantization", "palettization", "pruning")
        for part in ("spec", "config")
    ),
    ("bitwright.program",),
    ("bitwright.planning",),
    ("bitwright.quantization", "bitwright.palettization", "bitwright.pruning"),
    ("bitwright.artifact",),
    ("bitwright.export",),
    ("bitwright.inspection", "bitwright.integrations"),
    ("bitwright.demo",),
    ("bitwright.cli",),
)

# finalize() is the compressors' own method; the other two give names of coreai-opt the place that they have there.
ALLOWED = {
    ("bitwright.quantization._eager.engine", "bitwright.export"),
    ("bitwright.quantization._graph.engine", "bitwright.export"),
    ("bitwright.quantization._graph._prepare_for_export", "bitwright.export.coreml_graph"),
    ("bitwright._utils.metadata_utils", "bitwright.export.coreml_weights"),
}


def stage(module: str) -> int | None:
    """The number of a module's stage: of its longest prefix that is one."""
    found = [(len(name), number) for number, names in enumerate(STAGES) for name in names if within(module, name)]
    return max(found)[1] if found else None


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_no_stage_imports_from_one_to_its_right():
    wrong = set()
    for module, tree in modules().items():
        own = stage(module)
        for source, _ in imports(tree, module):
            other = stage(source)
            if own is not None and other is not None and other > own:
                wrong.add((module, source))
    assert sorted(wrong - ALLOWED) == []
    assert wrong >= ALLOWED, "an exception that is no longer needed"
