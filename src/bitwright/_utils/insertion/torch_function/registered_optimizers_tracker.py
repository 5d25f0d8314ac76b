"""A record of which simulators stand on which function calls of an eager model, in coreai-opt's form."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FunctionRegisteredOptimizers", "RegisteredOptimizersTracker"]


@dataclass(slots=True)
class FunctionRegisteredOptimizers:
    """Simulators of one call of a function; both lists are empty where nothing of the call is simulated.

    Attributes:
        input_optimizer_names: child names of the simulators on its arguments.
        output_optimizer_names: child names of the simulators on its outputs.
    """

    input_optimizer_names: list[str] = field(default_factory=list)
    output_optimizer_names: list[str] = field(default_factory=list)


class RegisteredOptimizersTracker:
    """Calls by module path and function name, in the order in which they run."""

    def __init__(self) -> None:
        self._registry: dict[str, dict[str, list[FunctionRegisteredOptimizers]]] = {}

    def register(self, module: str, function: str, record: FunctionRegisteredOptimizers) -> None:
        """Append the next call of ``function`` in ``module``."""
        self._registry.setdefault(module, {}).setdefault(function, []).append(record)

    def get_registry_dict(self) -> dict[str, dict[str, list[FunctionRegisteredOptimizers]]]:
        """Return everything, by module path."""
        return self._registry

    def get_module_registrations(self, module: str) -> dict[str, list[FunctionRegisteredOptimizers]]:
        """Return the calls of ``module`` by function name; empty where it calls none that is known."""
        return self._registry.get(module, {})

    def has_module(self, module: str) -> bool:
        """Whether a call of ``module`` is recorded."""
        return module in self._registry

    def has_function(self, module: str, function: str) -> bool:
        """Whether a call of ``function`` in ``module`` is recorded."""
        return function in self.get_module_registrations(module)

    def get_function_call_count(self, module: str, function: str) -> int:
        """Return how often ``module`` calls ``function``.

        Raises:
            RuntimeError: no call of ``module`` is recorded.
        """
        if module not in self._registry:
            raise RuntimeError(
                f"RegisteredOptimizersTracker has no module {module!r}; it has {sorted(self._registry)}."
            )
        return len(self._registry[module].get(function, ()))
