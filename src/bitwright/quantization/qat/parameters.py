"""The parameters that belong to quantization, for optimizers."""

from __future__ import annotations

from torch import nn

from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["range_parameters"]


def range_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned scales, offsets and clipping values of a prepared model, each once.

    They are numbers of another size than weights: give them a learning rate of their own and, but for PACT, no weight
    decay.

    Example:
        >>> from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
        >>> spec = {"weight": QuantizationSpec(fake_quantize_cls="lsq")}
        >>> config = QuantizerConfig(
        ...     global_config=ModuleQuantizerConfig(op_input_spec=None, op_output_spec=None, op_state_spec=spec),
        ...     execution_mode="eager",
        ... )
        >>> import torch
        >>> prepared = Quantizer(nn.Linear(4, 4), config).prepare((torch.randn(2, 4),))
        >>> len(range_parameters(prepared))
        1
    """
    found = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, FakeQuantizeImplBase)
        for parameter in module.parameters()
    }
    return list(found.values())
