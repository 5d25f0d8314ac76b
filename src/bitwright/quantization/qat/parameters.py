"""The parameters that belong to quantization, for optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

__all__ = ["parameter_groups", "range_parameters"]

_OFFSET_SHARE = 4.0
_SHARE_WITHOUT_RANGE = 0.1


def range_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned scales, offsets and clipping values of a prepared model, each once.

    They are numbers of another size than weights: give them a learning rate of their own (:func:`parameter_groups`
    does) and, but for PACT, no weight decay.

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
    return [parameter for _, parameters in _by_simulator(model) for parameter in parameters]


def parameter_groups(model: nn.Module, lr: float, *, range_lr: float = 0.01, **options: Any) -> list[dict[str, Any]]:
    """Return parameter groups for Adam and its kin, in which learned ranges have the learning rates that they need.

    An optimizer that divides by the size of the gradient moves every parameter by about its learning rate, whatever
    LSQ's gradient scale says, and the rate of weights is as large as a step of 8 bits. So each learned range gets a
    group whose rate is a share of its own step: ``range_lr * scale``, and four times that for the offset of LSQ+, which
    moves by whole steps. Ranges get no weight decay. For plain SGD give :func:`range_parameters` the rate of the
    weights, as the papers do.

    Args:
        model: the prepared model, calibrated; the rates follow from the scales that it has now. A range that has seen
            nothing but zeros so far, as of a new LoRA adapter, gets a tenth of ``lr``.
        lr: learning rate of the other parameters that require a gradient.
        range_lr: largest change of a step per update, relative to its size.
        **options: further options of the first group, such as ``weight_decay``.

    Returns:
        The group of the other parameters, then one group per learned tensor.

    Raises:
        ValueError: a rate is negative, or a learned range has seen no tensor yet.

    Example:
        >>> optimizer = torch.optim.Adam(parameter_groups(prepared, lr=1e-4))  # doctest: +SKIP
    """
    if lr < 0 or range_lr < 0:
        raise ValueError(f"Learning rates must not be negative, got lr={lr!r} and range_lr={range_lr!r}.")
    groups: list[dict[str, Any]] = [{"params": [], "lr": lr, **options}]
    learned: set[int] = set()
    for simulator, parameters in _by_simulator(model):
        learned |= {id(parameter) for parameter in parameters}
        if not all(parameter.numel() for parameter in parameters):
            raise ValueError(
                f"The learned range of {simulator.tensor_fqn!r} has no value yet. Run prepare or a calibration batch "
                "through the model first."
            )
        rate = range_lr * float(simulator.calculate_qparams()[0].detach().float().mean())
        if getattr(simulator.qparams_calculator, "_restart", False):
            rate = max(rate, lr * _SHARE_WITHOUT_RANGE)
        for name, parameter in simulator.named_parameters():
            if parameter.requires_grad and any(parameter is own for own in parameters):
                part = _OFFSET_SHARE if name.endswith("offset") else 1.0
                groups.append({"params": [parameter], "lr": rate * part, "weight_decay": 0.0})
    groups[0]["params"] = [p for p in model.parameters() if p.requires_grad and id(p) not in learned]
    return groups


def _by_simulator(model: nn.Module) -> Iterator[tuple[FakeQuantizeImplBase, list[nn.Parameter]]]:
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FakeQuantizeImplBase):
            own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
            seen |= {id(parameter) for parameter in own}
            if own:
                yield module, own
