"""The float model under a prepared one."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from bitwright._utils.parametrization import clear_parametrization
from bitwright.artifact.sites import activation_simulators, simulators_in, weight_sites
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.program.free_batch import write_batch_in_graph

from .conversion import is_prepared_graph
from .eager import replace_modules
from .lowering import shared_copy

__all__ = ["float_copy"]


def float_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode without simulators; it shares the tensors of the model.

    Args:
        model: prepared in eager or graph mode, or a module of ``torch.export``; not changed. Batch norms that graph
            mode folds are folded.
    """
    if isinstance(model, fx.GraphModule) and simulators_in(model) and is_prepared_graph(model):
        return _float_graph(model)
    twin = shared_copy(model).eval()
    for site in weight_sites(twin, strict=False):
        if site.is_packed:  # there is no float weight below
            continue
        for path, attribute in site.owners:
            clear_parametrization(twin.get_submodule(path), attribute)
    replace_modules(twin, {simulator: nn.Identity() for simulator in activation_simulators(twin).values()})
    return twin


def _float_graph(model: fx.GraphModule) -> fx.GraphModule:
    from bitwright.quantization._graph.finalize import folded_copy

    twin: fx.GraphModule = folded_copy(model)
    write_batch_in_graph(twin)
    for node in list(twin.graph.nodes):
        if node.op == "call_module" and isinstance(_called(twin, node), CompressionSimulatorBase):
            node.replace_all_uses_with(node.args[0])
            twin.graph.erase_node(node)
    twin.recompile()
    return twin


def _called(module: fx.GraphModule, node: fx.Node) -> Any:
    return module.get_submodule(str(node.target))
