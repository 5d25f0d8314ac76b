"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from bitwright.config._module_index import type_name as fqn

__all__ = ["fqn"]
