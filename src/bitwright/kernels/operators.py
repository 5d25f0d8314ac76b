"""The operator that ``torch.export`` records for a fake quantizer: ``bitwright::fake_quantize``.

It runs the dispatched kernel, has a gradient, and decomposes into the reference through ``decompositions()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitwright.formats import format_of

from . import reference
from .grid import Grid

__all__ = ["decompositions", "exported_fake_quantize"]


@torch.library.custom_op("bitwright::fake_quantize", mutates_args=())
def _operator(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: list[int],
    dtype: str,
    quant_min: float,
    quant_max: float,
    formulation: str,
) -> torch.Tensor:
    from .dispatch import form_for

    grid = _grid(dtype, quant_min, quant_max, formulation)
    y: torch.Tensor = form_for(x, zero_point).fake_quantize(
        x, scale, zero_point, minval, block_size=tuple(block_size), grid=grid
    )
    return y


@_operator.register_fake
def _(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: list[int],
    dtype: str,
    quant_min: float,
    quant_max: float,
    formulation: str,
) -> torch.Tensor:
    return torch.empty_like(x)


def _grid(dtype: str, quant_min: float, quant_max: float, formulation: str) -> Grid:
    fmt = format_of(dtype)
    if fmt.kind == "int":
        return Grid(fmt.dtype, int(quant_min), int(quant_max), formulation)
    return Grid(fmt.dtype, quant_min, quant_max, formulation)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, scale, zero_point, minval = ctx.saved_tensors
    block_size, *grid = ctx.rest
    inside = reference.inside_range(x, scale, zero_point, minval, block_size=tuple(block_size), grid=_grid(*grid))
    return grad * inside, *(None,) * 8


_operator.register_autograd(_backward, setup_context=_remember)


def exported_fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: tuple[int, ...],
    grid: Grid,
) -> torch.Tensor:
    """``reference.fake_quantize`` as the one operator ``bitwright::fake_quantize``."""
    y: torch.Tensor = _operator(
        x, scale, zero_point, minval, list(block_size),
        format_of(grid.dtype).name, float(grid.quant_min), float(grid.quant_max), grid.formulation,
    )  # fmt: skip
    return y


def _decomposed(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    minval: torch.Tensor | None,
    block_size: list[int],
    dtype: str,
    quant_min: float,
    quant_max: float,
    formulation: str,
) -> torch.Tensor:
    grid = _grid(dtype, quant_min, quant_max, formulation)
    return reference.fake_quantize(x, scale, zero_point, minval, block_size=tuple(block_size), grid=grid)


def decompositions() -> dict[Any, Callable[..., torch.Tensor]]:
    """Return a table for ``ExportedProgram.run_decompositions`` that turns the operator into plain torch."""
    return {torch.ops.bitwright.fake_quantize.default: _decomposed}
