"""The package's sources as syntax trees, and what they import from each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import bitwright

SOURCE = Path(bitwright.__file__).parent


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    return {_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def imports(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Pairs of the module that ``module`` imports from and the name; those inside of functions too."""
    here = module.split(".") if _is_package(module) else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            for alias in node.names:
                yield ".".join([*base, *filter(None, [node.module])]), alias.name


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_package(module: str) -> bool:
    return SOURCE.parent.joinpath(*module.split("."), "__init__.py").exists()
