"""The small weights of a graph, quantized by one kernel call before its ops run."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from bitwright._utils.direct_calls import DirectlyCalled
from bitwright.kernels.dispatch import undisturbed
from bitwright.kernels.many import quantized_small
from bitwright.kernels.saved import hooked_by_others

__all__ = ["SmallWeights", "weights_simulated_once"]

_grad_enabled = torch.is_grad_enabled
_backward_task = torch._C._current_graph_task_id


def weights_simulated_once(graph: fx.Graph) -> dict[str, str]:
    """Return the weight in front of each simulator that is called at one place, by the simulator's name.

    Args:
        graph: its owning module has the simulators as children.
    """
    found: dict[str, str] = {}
    again: set[str] = set()
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        name = str(node.target)
        simulator = None if graph.owning_module is None else graph.owning_module._modules.get(name)
        source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        on_weight = isinstance(source, fx.Node) and source.op == "get_attr"
        if name in found or not on_weight or not isinstance(simulator, DirectlyCalled):
            again.add(name)
        else:
            found[name] = str(source.target)  # type: ignore[union-attr]
    return {name: weight for name, weight in found.items() if name not in again}


def _has_hooks(weight: Any) -> bool:
    """Whether somebody waits for the gradient of a weight."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class SmallWeights:
    """Quantizes those weights whose simulators would do nothing but take their short way.

    What the simulators ask is asked here, for each of them; a weight for which anything is out of the ordinary is left
    to its simulator.

    Args:
        weights: what ``weights_simulated_once`` returned.
    """

    def __init__(self, weights: dict[str, str]) -> None:
        self._places = [(name, weight.split(".")) for name, weight in weights.items()]

    def quantized(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the quantized weights by the names of their simulators.

        Args:
            model: owner of the graph; nothing concerns every call of a module at the time (``direct_calls.caller``).
        """
        if not (model.training or _grad_enabled()):  # weights are kept quantized
            return {}
        # Both passes of gradient checkpointing must save the same tensors. Where processes exchange gradients they wait
        # for each of them, and these come together.
        repeated = _backward_task() != -1 or hooked_by_others()
        if repeated or not undisturbed() or _is_distributed():
            return {}
        modules = model._modules
        names, weights, tasks = [], [], []
        for name, (*owners, attribute) in self._places:
            simulator = modules[name]
            own = simulator.__dict__
            shortcut = own.get("_shortcut")
            if shortcut is None or shortcut.task is None or "forward" in own:
                continue
            if not (shortcut.direct or shortcut.ask(simulator)):
                continue
            owner = model
            for step in owners:
                owner = owner._modules[step]
            weight = owner._parameters.get(attribute)
            if weight is None or not weight.is_cpu:
                continue
            task = shortcut.task(simulator, weight)
            if task is not None and not _has_hooks(weight):
                names.append(name)
                weights.append(weight)
                tasks.append(task)
        found = zip(names, quantized_small(weights, tasks), strict=True)
        return {name: y for name, y in found if y is not None}
