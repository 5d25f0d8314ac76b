"""Ops that depend on training or evaluation, as modules, so that ``train()`` and ``eval()`` reach them.

``torch.export`` writes the mode into the graph as a constant. With the constant in a module's ``training`` flag,
switching a graph costs what it costs for any module, and nothing has to be traced or compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from bitwright.program.aten_names import schema_names
from bitwright.program.graph_module import TracedGraphModule

from .batch_norm import captured_momentum, normalised_by_batch

__all__ = ["AttentionOp", "BatchNormOp", "ModeOp", "batch_counter", "install_mode_ops"]

CONTAINER = "training_ops"

_BATCH_NORM = "aten::batch_norm"
_INSTANCE_NORM = "aten::instance_norm"
_ATTENTION = "aten::scaled_dot_product_attention"
# Name of the argument that says "training", by op.
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        **{
            f"aten::{name}{suffix}": "train"
            for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
            for suffix in ("", "_")
        },
        **{f"aten::{name}": "train" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
        **{f"aten::{name}": "training" for name in ("rrelu", "rrelu_")},
        _INSTANCE_NORM: "use_input_stats",
    }
)


class ModeOp(nn.Module):
    """Calls an op with its training flag set to the mode that this module is in.

    Args:
        op: overload of an aten op.
        position: of the flag among the arguments.
    """

    def __init__(self, op: Callable[..., Any], position: int) -> None:
        super().__init__()
        self.op = op
        self.position = position

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op; ``args`` are its arguments without the flag."""
        return self.op(*args[: self.position], self.training, *args[self.position :], **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        schema: Any = self.op._schema  # type: ignore[attr-defined]
        return {**self.__dict__, "op": (schema.name.partition("::")[2], schema.overload_name or "default")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, overload = state["op"]
        self.__dict__.update({**state, "op": getattr(getattr(torch.ops.aten, name), overload)})

    def __deepcopy__(self, memo: dict[int, Any]) -> ModeOp:
        twin = type(self)(self.op, self.position)
        twin.training = self.training
        return twin

    def extra_repr(self) -> str:
        """Return the op's name."""
        return str(self.op)


class AttentionOp(nn.Module):
    """Attention that drops weights in training only.

    Args:
        dropout_p: probability of dropping an attention weight in training.
    """

    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        """Call ``scaled_dot_product_attention``."""
        dropout_p = self.dropout_p if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **kwargs)


class BatchNormOp(nn.Module):
    """Batch norm that uses and updates the statistics of the batch in training, and the running ones otherwise.

    Args:
        momentum: weight of the batch in the running statistics, None for the mean over all batches.
        eps: added to the variance.
    """

    def __init__(self, momentum: float | None, eps: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        batches: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise ``x`` of shape (N, C, ...); ``batches`` counts the batches seen in training."""
        if self.training:
            return normalised_by_batch(x, weight, bias, running_mean, running_var, batches, self.momentum, self.eps)
        return nn.functional.batch_norm(
            x, running_mean, running_var, weight, bias, False, self.momentum or 0.0, self.eps
        )


def install_mode_ops(module: TracedGraphModule, attention_dropout: Mapping[str, float]) -> None:
    """Replace the ops of ``module`` that depend on the mode by modules in the mode that was captured.

    Args:
        module: the captured graph.
        attention_dropout: of the modules that drop attention weights in training only, by path: in evaluation they
            call attention without, and no argument of it shows.
    """
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        if name == _INSTANCE_NORM and _argument(node, "running_mean", None) is None:
            continue  # always normalises by the input
        if name in _FLAGS:
            _install_flagged(module, node, _FLAGS[name])
        elif name == _BATCH_NORM:
            _install_batch_norm(module, node)
        elif name == _ATTENTION:
            _install_attention(module, node, attention_dropout)


def _install_flagged(module: TracedGraphModule, node: fx.Node, flag: str) -> None:
    position = schema_names(node.target).index(flag)
    if position >= len(node.args):
        return
    op: Any = node.target
    replacement = ModeOp(op, position)
    replacement.training = bool(node.args[position])
    _replace(module, node, replacement, (*node.args[:position], *node.args[position + 1 :]), dict(node.kwargs))


def _install_batch_norm(module: TracedGraphModule, node: fx.Node) -> None:
    arguments: Any = node.args
    x, weight, bias, mean, var, training, momentum, eps = arguments[:8]
    if mean is None or var is None:  # always normalises by the batch
        return
    replacement = BatchNormOp(captured_momentum(momentum), float(eps))
    replacement.training = bool(training)
    batches = batch_counter(module, mean)
    _replace(module, node, replacement, (x, weight, bias, mean, var, batches), {})


def batch_counter(module: TracedGraphModule, running_mean: Any) -> fx.Node | None:
    """Return the node of the batch counter beside ``running_mean``, and remove what a captured step adds to it."""
    if not isinstance(running_mean, fx.Node) or running_mean.op != "get_attr":
        return None
    path = str(running_mean.target).rpartition(".")[0]
    name = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
    container: Any = module.get_submodule(path)
    if container._buffers.get("num_batches_tracked") is None:
        return None
    known = next((n for n in module.graph.find_nodes(op="get_attr", target=name)), None)
    if known is None:
        with module.graph.inserting_before(running_mean):
            known = module.graph.get_attr(name)
    for user in list(known.users):
        if not user.users and user.target is torch.ops.aten.add_.Tensor:
            module.graph.erase_node(user)
    return known


def _install_attention(module: TracedGraphModule, node: fx.Node, in_training: Mapping[str, float]) -> None:
    captured = float(_argument(node, "dropout_p", 0.0))
    path, _ = next(reversed((node.meta.get("nn_module_stack") or {"": ("", None)}).values()))
    dropout = captured or in_training.get(path.partition("@")[0], 0.0)  # further calls of a module are path@1, ...
    if dropout == 0.0:
        return
    replacement = AttentionOp(dropout)
    replacement.training = captured > 0.0
    names = schema_names(node.target)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given.pop("dropout_p", None)
    args = (given.pop(names[0]), given.pop("key"), given.pop("value"), given.pop("attn_mask", None))
    _replace(module, node, replacement, args, given)


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    position = schema_names(node.target).index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _replace(
    module: TracedGraphModule, node: fx.Node, replacement: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    container = module._modules.setdefault(CONTAINER, nn.Module())
    assert container is not None
    container.training = module.training
    name = node.name
    container.add_module(name, replacement)
    with module.graph.inserting_before(node):
        call = module.graph.create_node("call_module", f"{CONTAINER}.{name}", args, kwargs)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)
    call.name = name
