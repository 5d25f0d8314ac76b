"""Hooks by which a plugin teaches export to handle activations that Core AI's own ops cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import fx, nn

from bitwright.common import ExportBackend

from .config import ExecutionMode
from .spec.fake_quantize import FakeQuantizeImplBase
from .spec.granularity import PerChannelGranularity, PerTensorGranularity, QuantizationGranularity

__all__ = [
    "EagerActivationExportHandler",
    "GraphActivationExportHandler",
    "can_export_stateless_fake_quant",
    "canonicalize_qparam_shape",
    "get_activation_export_handler",
    "refuse_stateless",
    "register_eager_activation_export_handler",
    "register_graph_activation_export_handler",
    "unsupported_activation",
    "validate_activation_export_supported",
]

GraphActivationExportHandler: TypeAlias = Callable[[fx.GraphModule, fx.Node, FakeQuantizeImplBase], None]
"""``handler(graph_module, node, simulator)`` puts nodes of its own in the place of ``node`` and erases it."""

EagerActivationExportHandler: TypeAlias = Callable[[FakeQuantizeImplBase], nn.Module]
"""``handler(simulator)`` returns the module that takes the simulator's place."""

_GRAPH_ACTIVATION_EXPORT_HANDLERS: dict[type[QuantizationGranularity], GraphActivationExportHandler] = {}
_EAGER_ACTIVATION_EXPORT_HANDLERS: dict[type[QuantizationGranularity], EagerActivationExportHandler] = {}


def register_graph_activation_export_handler(
    granularity_cls: type[QuantizationGranularity], handler: GraphActivationExportHandler
) -> None:
    """Have ``handler`` export activations of exactly this granularity class from graph mode to Core AI."""
    _GRAPH_ACTIVATION_EXPORT_HANDLERS[granularity_cls] = handler


def register_eager_activation_export_handler(
    granularity_cls: type[QuantizationGranularity], handler: EagerActivationExportHandler
) -> None:
    """Have ``handler`` export activations of exactly this granularity class from eager mode to Core AI."""
    _EAGER_ACTIVATION_EXPORT_HANDLERS[granularity_cls] = handler


def get_activation_export_handler(
    granularity: QuantizationGranularity, execution_mode: ExecutionMode
) -> GraphActivationExportHandler | EagerActivationExportHandler | None:
    """Return the handler that is registered for a granularity's class, or None."""
    if execution_mode == ExecutionMode.GRAPH:
        return _GRAPH_ACTIVATION_EXPORT_HANDLERS.get(type(granularity))
    return _EAGER_ACTIVATION_EXPORT_HANDLERS.get(type(granularity))


def can_export_stateless_fake_quant(simulator: FakeQuantizeImplBase, execution_mode: ExecutionMode) -> bool:
    """Return whether a handler takes a simulator whose parameters are computed at run time."""
    return get_activation_export_handler(simulator.granularity, execution_mode) is not None


def refuse_stateless(
    activations: Iterable[tuple[str, FakeQuantizeImplBase]], backend: ExportBackend, execution_mode: ExecutionMode
) -> None:
    """Check that the parameters of all activations are known before run time.

    Raises:
        NotImplementedError: those of one are not, and no handler takes it; names it.
    """
    for name, simulator in activations:
        if not simulator.is_stateless:
            continue
        if backend == ExportBackend.CoreAI and can_export_stateless_fake_quant(simulator, execution_mode):
            continue
        remedy = "Use a static qparam_calculator_cls such as 'moving_average'"
        remedy += ", or register an activation export handler" if backend == ExportBackend.CoreAI else ""
        raise NotImplementedError(
            f"Activation {name!r} uses dynamic quantization ({type(simulator.qparams_calculator).__name__}), which "
            f"{backend.value} cannot hold: its parameters would have to be computed at run time. {remedy}."
        )


def unsupported_activation(simulator: FakeQuantizeImplBase) -> str | None:
    """Return why Core AI's ``quantize`` and ``dequantize`` do not hold an activation, and what to use; None if they do.

    They hold integers and FP8, per tensor and per channel.
    """
    granularity = simulator.granularity
    if simulator.dtype == torch.float4_e2m1fn_x2:
        return (
            "Core AI export does not support FP4 activation quantization: its quantize op has no output for FP4 "
            "activations. Use an integer or FP8 dtype, with PerTensorGranularity or PerChannelGranularity"
        )
    if not isinstance(granularity, PerTensorGranularity | PerChannelGranularity):
        return (
            f"Core AI export does not support {type(granularity).__name__} on activations. Use PerTensorGranularity or "
            "PerChannelGranularity, or install an extension that registers an activation export handler for it"
        )
    return None


def validate_activation_export_supported(simulator: FakeQuantizeImplBase) -> None:
    """Check that Core AI's ``quantize`` and ``dequantize`` hold an activation.

    Raises:
        ValueError: the granularity is neither per tensor nor per channel, or the format is FP4.
    """
    problem = unsupported_activation(simulator)
    if problem is not None:
        name = getattr(simulator, "tensor_fqn", "<unknown>")
        is_fp4 = simulator.dtype == torch.float4_e2m1fn_x2
        kept = "" if is_fp4 else "; or keep the simulated model with ExportBackend._TORCH"  # as coreai-opt proposes
        raise ValueError(f"Activation {name!r}: {problem}{kept}.")


def canonicalize_qparam_shape(qparam: torch.Tensor, granularity: QuantizationGranularity) -> torch.Tensor:
    """Return a scale, zero point or minval in the shape that Core AI's ops take: 0-D per tensor, 1-D per channel.

    Raises:
        ValueError: another granularity.
    """
    if isinstance(granularity, PerTensorGranularity):
        return qparam.reshape(())
    if isinstance(granularity, PerChannelGranularity):
        return qparam.reshape(-1)
    raise ValueError(
        f"The parameters of {type(granularity).__name__} are neither 0-D nor 1-D; Core AI's quantize ops take "
        "PerTensorGranularity and PerChannelGranularity."
    )
