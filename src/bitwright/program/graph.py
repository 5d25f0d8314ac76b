"""Graph front end: ``torch.export`` in, a graph module that owns nothing of the user's, and its program out."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from bitwright.errors import TraceError

from .dynamic_marks import inputs_unmarked
from .export_errors import UnknownClassError, export_failure, forward_problem
from .exporting import exported, one_at_a_time
from .float_graph import FloatGraph
from .foreign_results import without_foreign_results
from .graph_module import TracedGraphModule
from .graph_program import build_program
from .input_shapes import InputShapesError
from .kept_tensors import without_kept_results
from .masks import holds_mask
from .model import Program
from .no_grad_scopes import no_grad_noted
from .stack_traces import short_stack_traces
from .unlift import unlift

__all__ = ["capture_graph", "plain_attention"]


def capture_graph(
    model: nn.Module,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    no_grad: bool = True,
    boundaries: Sequence[str] = (),
    *,
    generate: bool = True,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[TracedGraphModule, Program]:
    """Capture ``model`` with ``torch.export`` in the mode (training or eval) that it is in.

    Args:
        model: the model; it is not changed. The graph module refers to its parameters and buffers.
        example_inputs: positional inputs.
        example_kwargs: keyword inputs.
        dynamic_shapes: as ``torch.export.export`` takes it.
        no_grad: capture with gradients disabled, which is what ``torch.is_grad_enabled()`` then says to the model.
        boundaries: paths of modules whose inputs and outputs the program shall record, besides the root.
        generate: write the module's code now; False for a graph that will be changed before it is called.
        within: what the caller has put around this call, for the model: later captures, which tell whether the graph
            holds for other batches, stand in that too.

    Returns:
        The graph module, and the program; an op's ``handle`` is its node in that module's graph.

    Raises:
        TraceError: the model cannot be exported; says why, in which line of the model, and what to do.
    """
    captured = _export(model, example_inputs, dict(example_kwargs or {}), dynamic_shapes, no_grad, boundaries)
    module = unlift(captured, model, _Recapture(no_grad, within))
    if generate:
        module.recompile()
    program = build_program(module, model, captured.module_call_graph)
    given = [leaf for leaf in tree_leaves(captured.example_inputs) if isinstance(leaf, torch.Tensor)]
    if len(given) == len(program.inputs):
        for value, tensor in zip(program.inputs, given, strict=True):
            value.is_masked = holds_mask(tensor)
    return module, program


@dataclass(frozen=True, slots=True)
class _Recapture:
    """Captures a model once more as it was captured."""

    no_grad: bool
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]]

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FloatGraph | None:
        """Capture a model with other inputs; see ``Recapture``."""
        with self.within(model):
            check = unlift(_export(model, args, dict(kwargs), None, self.no_grad, ()), model)._input_check
        return None if check is None else check.origin.graph


def _export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    no_grad: bool,
    boundaries: Sequence[str],
) -> torch.export.ExportedProgram:
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time)
        if no_grad:
            stack.enter_context(torch.no_grad())
        stack.enter_context(no_grad_noted())
        stack.enter_context(inputs_unmarked(args, kwargs))
        stack.enter_context(plain_attention())
        stack.enter_context(short_stack_traces())
        stack.enter_context(without_foreign_results(model))
        stack.enter_context(without_kept_results(model))
        stack.enter_context(_quiet())
        stack.enter_context(contextlib.redirect_stderr(_WithoutDump(sys.stderr)))
        try:
            return exported(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, preserve_module_call_signature=tuple(boundaries)
            )
        except (InputShapesError, UnknownClassError):
            raise
        except Exception as error:
            problem = forward_problem(model, args, kwargs)
            problem = problem or _scripted_module(model) or _inference_tensor(model)
            raise export_failure(error) if problem is None else problem from error


def _scripted_module(model: nn.Module) -> TraceError | None:
    """Return what to tell of the first TorchScript module in a model, None if there is none."""
    scripted = (path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    path = next(scripted, None)
    if path is None:
        return None
    return TraceError(
        f"torch.export could not capture the model, which has a TorchScript module, {path!r}. Use the nn.Module that "
        'it was scripted or traced from, or leave it out in eager mode: QuantizerConfig(execution_mode="eager") and '
        f"set_module_name({path!r}, None)."
    )


def _inference_tensor(model: nn.Module) -> TraceError | None:
    """Return what to tell of the first tensor in a model that was made under ``torch.inference_mode``, or None."""
    made = (name for name, tensor in _tensors(model) if tensor.is_inference())
    name = next(made, None)
    if name is None or torch.is_inference_mode_enabled():
        return None
    return TraceError(
        f"torch.export could not capture the model, whose {name!r} was made under torch.inference_mode. Build or load "
        "the model outside of it, or prepare copy.deepcopy(model), made outside. torch.no_grad needs none of this."
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class _WithoutDump(io.TextIOBase):
    """A stream without the program that ``torch.export`` writes there, as far as it got, when it fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if "def forward(self, arg0_1" not in text and self._stream is not None:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Let torch's attention modules call plain ops, not the fused one for inference, and use a mask as it is.

    Nothing can be quantized inside that one, and converters lack it. ``nn.Transformer`` and its parts look whether a
    mask is the causal one, to save its addition; no export can capture that branch on the mask's numbers.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    detect = vars(transformer).get(_DETECTION)
    torch.backends.mha.set_fastpath_enabled(False)
    if detect is not None:
        setattr(transformer, _DETECTION, _told_to_be_causal)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        if detect is not None:
            setattr(transformer, _DETECTION, detect)


_DETECTION = "_detect_is_causal_mask"


def _told_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Say whether the caller says that ``mask`` is causal."""
    return is_causal is True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what ``torch.export`` says about its own workings."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assigned during export.*")
            yield
    finally:
        logger.setLevel(level)
