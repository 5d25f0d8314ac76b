"""The public functions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from bitwright.errors import BitwrightWarning

from ._float_pass import apply_float_plan
from ._float_plan import FloatPlanner
from ._ignored import IgnoredOps, ignore_rule
from ._int_pass import apply_int16
from ._intervals import Interval, dtype_interval
from ._observe import peak_values
from ._program import check_program, user_inputs
from ._ranges import RangeAnalysis

_FLOAT_TARGETS = (torch.float16, torch.bfloat16)


class CastingWarning(BitwrightWarning):
    """A part of a program was left as it was; the message names the nodes and says what would let them be cast."""


def cast_fp32_to_fp16(
    exported_program: ExportedProgram,
    ignored_ops: IgnoredOps = None,
    *,
    dtype: torch.dtype = torch.float16,
    example_inputs: Any = None,
    calibration_data: Any = None,
) -> ExportedProgram:
    """Cast the float32 values of an exported program to float16 (or bfloat16), in place.

    Weights, buffers, constants, inputs, outputs and everything between become 16-bit; the caller feeds half
    precision inputs from then on. These stay in float32:

    * nodes that ``ignored_ops`` names;
    * tensors with finite values beyond the 16-bit range, or that lie mostly below its normal numbers, and their
      consumers;
    * values that the example inputs drive beyond the range, and their consumers (they are named in a log warning);
    * what is computed from bfloat16 values, when the target is float16;
    * operators that turn integers beyond the range into floats, as far as these are proven or seen;
    * positions, which are floats made of integers, up to where every digit of them matters: sines and cosines,
      roundings, casts to integers, and, unless activations are mixed in, comparisons, remainders and searches;
    * loops (``while_loop``) whose end is computed from floats, in the condition or in the body: rounded steps might
      never reach it;
    * complex numbers, operators without a 16-bit kernel in PyTorch, ``logit`` with an ``eps`` that the 16-bit dtype
      does not subtract from one.

    Results of such nodes are narrowed again where 16-bit consumers read them. Infinities stay infinities; finite
    values from 1e38 on stand for infinity in masks and become the largest finite number, and so do the results of
    operators that multiply by, or bound with, a number beyond the 16-bit range; a scalar that is not zero
    does not become zero, a bound or an offset near one does not become one, and comparisons with a scalar answer as
    with its exact value: for a constant as they did for its float32 values, for other tensors as if the largest finite
    number of the 16-bit format stood for infinity. Graphs called by ``cond``, ``while_loop``, ``scan`` and the like are
    cast with their callers.

    Args:
        exported_program: the program, as exported or decomposed.
        ignored_ops: an operator (``torch.ops.aten.exp.default``), an operator packet (``torch.ops.aten.exp``, for all
            overloads), a collection of these, or a function of a ``torch.fx.Node`` that returns a bool.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        example_inputs: what one call of the program takes, in float32: a tuple of positional arguments, a mapping of
            arguments by name, a pair of both, or one tensor. The program runs once on them to find overflows.
        calibration_data: an iterable of such calls, for example a data loader; or one of them.

    Returns:
        ``exported_program`` itself.

    Raises:
        TypeError: ``exported_program`` is no ``ExportedProgram``, or ``ignored_ops`` has none of the forms above (a
            string, say).
        ValueError: ``dtype`` is no 16-bit float dtype, the example inputs do not fit the program, or the program writes
            in place to a tensor of which one side stays float32.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(4, 2), (torch.randn(1, 4),))
        >>> cast_fp32_to_fp16(program).module()(torch.randn(1, 4).half()).dtype
        torch.float16
    """
    check_program(exported_program)
    if dtype not in _FLOAT_TARGETS:
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype!r}.")
    ignored = ignore_rule(ignored_ops)
    peaks: dict[Node, float] = {}
    for inputs in (example_inputs, calibration_data):
        if inputs is not None:
            for node, peak in peak_values(exported_program, inputs).items():
                peaks[node] = max(peak, peaks.get(node, 0.0))
    planner = FloatPlanner(dtype, ignored, peaks, RangeAnalysis(exported_program).intervals)
    apply_float_plan(exported_program, planner.plan(exported_program))
    return exported_program


def cast_fp32_to_bf16(
    exported_program: ExportedProgram,
    ignored_ops: IgnoredOps = None,
    *,
    example_inputs: Any = None,
    calibration_data: Any = None,
) -> ExportedProgram:
    """Cast the float32 values of an exported program to bfloat16, in place; see :func:`cast_fp32_to_fp16`.

    bfloat16 has the range of float32 and 8 bits of precision: hardly anything overflows, results are coarser.

    coreai-torch 0.4.3 converts the result as it does any bfloat16 program: not where there are batch norms or tensors
    that are filled with a number (``full``, ``zeros``, the first states of an LSTM). These end in a ``ValueError`` that
    says ``f32 vs bf16``; ``bitwright.export.coreai.export_coreai`` writes bfloat16 models that have them.
    """
    return cast_fp32_to_fp16(
        exported_program,
        ignored_ops,
        dtype=torch.bfloat16,
        example_inputs=example_inputs,
        calibration_data=calibration_data,
    )


def cast_int32_to_int16(
    exported_program: ExportedProgram, *, value_ranges: Mapping[str, tuple[int, int]] | None = None
) -> ExportedProgram:
    """Do integer additions, subtractions and products in int16 where their bounds are proven to fit, in place.

    Cast are operations on two int32 or int64 tensors that depend on the inputs and feed no index, together with the
    views, concatenations and selections around them, when interval analysis proves that operands and results lie in
    -32768..32767. Bounds come from constants, sizes, ``arange``, comparisons, ``argmax`` and the like, from indices
    (a valid index lies inside its axis) and from ``value_ranges``. Everything else stays as it is, with a warning
    that names the arithmetic for which the proof is missing. Results leave the program in the dtype they had; an
    input that is cast (its range was declared or proven) is fed as int16 from then on.

    Args:
        exported_program: the program, as exported or decomposed.
        value_ranges: smallest and largest value, both included, of inputs or of other nodes, by name.

    Returns:
        ``exported_program`` itself.

    Raises:
        TypeError: ``exported_program`` is no ``ExportedProgram``, or ``value_ranges`` no mapping.
        ValueError: ``value_ranges`` names no integer node of the program, or is no pair of integers in order.

    Warns:
        CastingWarning: arithmetic was left alone because its bounds are unknown or too wide.
    """
    check_program(exported_program)
    analysis = RangeAnalysis(exported_program, _declared(exported_program, value_ranges or {}))
    unproven = apply_int16(exported_program, analysis)
    if unproven:
        listed = "; ".join(str(entry) for entry in unproven)
        warnings.warn(
            "Integer arithmetic was not cast to int16, because its values are not proven to lie in -32768..32767: "
            f"{listed}. "
            "Declare what you know of the inputs: value_ranges={name: (smallest, largest)}.",
            CastingWarning,
            stacklevel=2,
        )
    return exported_program


def cast_to_16_bit_precision(
    exported_program: ExportedProgram,
    ignored_ops: IgnoredOps = None,
    *,
    dtype: torch.dtype = torch.float16,
    example_inputs: Any = None,
    calibration_data: Any = None,
    value_ranges: Mapping[str, tuple[int, int]] | None = None,
) -> ExportedProgram:
    """Apply :func:`cast_fp32_to_fp16` and then :func:`cast_int32_to_int16`, in place.

    Arguments, errors and warnings are those of the two functions.

    Returns:
        ``exported_program`` itself.
    """
    check_program(exported_program)
    _declared(exported_program, value_ranges or {})
    cast_fp32_to_fp16(
        exported_program, ignored_ops, dtype=dtype, example_inputs=example_inputs, calibration_data=calibration_data
    )
    return cast_int32_to_int16(exported_program, value_ranges=value_ranges)


def _declared(program: ExportedProgram, value_ranges: Mapping[str, tuple[int, int]]) -> dict[Node, Interval]:
    integers = {
        node.name: node
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        and not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    }
    if not isinstance(value_ranges, Mapping):
        raise TypeError(f"value_ranges must map names to (smallest, largest), got {value_ranges!r}.")
    declared: dict[Node, Interval] = {}
    for name, bounds in value_ranges.items():
        if name not in integers:
            inputs = [node.name for node in user_inputs(program) if node.name in integers]
            raise ValueError(
                f"value_ranges names {name!r}, which is no integer value of the program. Its integer inputs: {inputs}."
            )
        is_pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(isinstance(bound, int) for bound in bounds)
        if not is_pair or bounds[0] > bounds[1]:
            raise ValueError(f"value_ranges[{name!r}] must be (smallest, largest) in integers, got {bounds!r}.")
        declared[integers[name]] = Interval(*bounds).meet(dtype_interval(integers[name].meta["val"].dtype))
    return declared
