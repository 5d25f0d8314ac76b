"""The graph engine: export, plan, insert, finalize."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from bitwright._utils.module_copy import collector_paused
from bitwright._utils.unstacked import unstacked
from bitwright.base_model_compressor import _BaseModelCompressor
from bitwright.common import ExportBackend
from bitwright.planning import Plan
from bitwright.planning.graph import GraphDecisions, boundary_paths, plan_graph_quantization
from bitwright.planning.unusable_weights import refuse_quantized, refuse_unusable, tensors_needed
from bitwright.program.export_errors import blaming_inputs
from bitwright.program.graph import capture_graph
from bitwright.program.graph_module import TracedGraphModule, uncompiled_copy
from bitwright.program.no_grad_scopes import stop_gradients
from bitwright.quantization._engine import Engine, ExampleInputs
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._annotation_pattern_registry import registered_roles
from .annotations import annotate
from .apart import magnitudes_seen, part_by_magnitude
from .batch_norm import cumulative_averages_shown
from .finalize import folded_copy
from .fold_insert import foldable_biases, foldable_norms
from .initialise import initialise, observe
from .insert import GraphInsertion
from .kv_cache import keep_caches_quantized
from .memory import cut_gradients_between_calls

__all__ = ["GraphEngine"]

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _shown_whole(model: nn.Module) -> Iterator[Mapping[str, tuple[nn.Module, ...]]]:
    """Let a capture see cumulative averages, and weights without the simulators on them, which it yields."""
    with cumulative_averages_shown(model), unstacked(model) as stacks:
        yield stacks


class GraphEngine(Engine):
    """Works on an exported copy of the model's program; the model itself is left alone."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__(model, config)
        self._captured: tuple[TracedGraphModule, GraphDecisions] | None = None
        self._paths: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was captured, which can be neither copied nor pickled, and is captured anew before ``insert``.

        Raises:
            TypeError: after ``insert``, as the plan stands on what was captured.
        """
        if self._captured is None and "program" in self.__dict__:
            raise TypeError(
                "A Quantizer in graph mode can be neither copied nor pickled once it has prepared a model: its plan "
                "refers to the exported program. Copy or pickle the prepared model instead; quantizer.finalize(copy, "
                "backend=...) takes it."
            )
        return {name: value for name, value in self.__dict__.items() if name != "program"} | {"_captured": None}

    def plan(self, example: ExampleInputs) -> Plan:
        """Capture the program with ``torch.export`` and plan for it; see the base class."""
        refuse_quantized("Quantizer", self.model, self.config)
        with collector_paused(), _shown_whole(self.model) as stacks:
            module, self.program = capture_graph(
                self.model,
                example.args,
                example.kwargs,
                example.dynamic_shapes,
                example.no_grad,
                boundary_paths(self.config, self.model),
                generate=False,
                within=_shown_whole,
            )
            decisions = plan_graph_quantization(self.config, self.model, self.program, registered_roles(), stacks)
        self._captured = module, decisions
        self._count_folded_biases(module, decisions)
        return decisions.plan

    def folded(self) -> nn.Module | None:
        """See the base class."""
        assert self._captured is not None
        module, decisions = self._captured
        norms = foldable_norms(module, GraphInsertion(module, self.program, decisions).foldable())
        if not norms:
            return None
        tensors = [*module.parameters(), *module.buffers()]
        twin = uncompiled_copy(module, {id(tensor): tensor for tensor in tensors})
        for node in list(twin.graph.nodes):
            if node.name in norms:
                node.replace_all_uses_with(node.args[0])
                twin.graph.erase_node(node)
        twin.recompile()
        return twin

    def _count_folded_biases(self, module: TracedGraphModule, decisions: GraphDecisions) -> None:
        """Show what the batch norms that are folded into quantized biases make of them, which is floats again."""
        folded = foldable_biases(module, GraphInsertion(module, self.program, decisions).foldable())
        biases = {state.name for state in self.program.states.values() if not folded.isdisjoint(state.names)}
        rows = decisions.plan.rows
        for number, row in enumerate(rows):
            if row.tensor in biases and row.spec is not None:
                note = "stored in full: a batch norm is folded into it"
                rows[number] = replace(row, compressed_bytes=row.dense_bytes, note=note)

    def insert(self, example: ExampleInputs, plan: Plan, complete: Callable[[nn.Module], None]) -> nn.Module:
        """Insert into the graph that the last ``plan`` captured, and return it."""
        assert self._captured is not None
        module, decisions = self._captured
        assert decisions.plan is plan
        refuse_unusable("Quantizer", tensors_needed(plan, self.program))
        self._captured = None
        insertion = GraphInsertion(module, self.program, decisions)
        attentions = [(p, m) for p, m in self.model.named_modules() if isinstance(m, nn.MultiheadAttention)]
        with collector_paused():
            insertion.run({path: attention.dropout for path, attention in attentions})
            annotate(module, decisions)
            with blaming_inputs(self.model, example.args, example.kwargs):  # a capture does not read indices
                with magnitudes_seen(module) as seen:
                    initialise(module, self.program, example)
                apart = part_by_magnitude(insertion, seen)
                if apart:
                    observe(module, self.program, example, apart)
            insertion.join_ranges()
            cut_gradients_between_calls(module, self.program)
            stop_gradients(module)
        self._paths = {name: placement.module_path for name, (_, placement) in insertion.simulators.items()}
        self._preserve_attributes(module)
        complete(module)
        return module

    def module_paths(self) -> Mapping[str, str]:
        """Return the paths of the last ``insert``."""
        return self._paths

    def simulators_of(self, model: nn.Module, path: str) -> list[Any]:
        """Return the simulators whose configuration came from ``path`` or from below it, by any of their names."""
        originals = dict(self.model.named_modules(remove_duplicate=False))
        inside = set(originals[path].modules()) if path in originals else set()
        owners = {name for name, original in originals.items() if original in inside}
        names = [name for name, owner in self._paths.items() if owner in owners]
        modules = dict(model.named_modules(remove_duplicate=False))
        found = [modules[name] for name in names if isinstance(modules.get(name), FakeQuantizeImplBase)]
        return list(dict.fromkeys(found))

    def finalize(self, model: nn.Module, backend: ExportBackend, mmap_dir: str | None) -> nn.Module:
        """Finalize a copy with its batch norms folded; ``model`` is left alone."""
        if not isinstance(model, TracedGraphModule):
            raise TypeError(f"model must be a torch.fx.GraphModule from prepare(), got {type(model).__name__}.")
        with collector_paused():
            finalized = folded_copy(model)
            _BaseModelCompressor._unmark_model(finalized)
            if backend == ExportBackend._TORCH:
                finalized.recompile()
                return finalized
            from bitwright.export import finalize_graph

            exported = finalize_graph(finalized, backend, mmap_dir)
        if backend == ExportBackend.CoreAI:
            keep_caches_quantized(exported, self.config.kv_cache_quant_configs)
        return exported

    def _preserve_attributes(self, module: nn.Module) -> None:
        for name in self.config.preserved_attributes or ():
            if hasattr(self.model, name):
                setattr(module, name, getattr(self.model, name))
            else:
                _logger.warning(
                    "Attribute %r of preserved_attributes was not found on %s and will be skipped.",
                    name,
                    type(self.model).__name__,
                )
