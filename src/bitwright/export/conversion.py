"""What writers of all targets share: finalized copies, their capture, errors and noise of other people's converters."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import itertools
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from bitwright._utils.kept_layouts import finalized_for, finalized_words
from bitwright.artifact.graph_sites import GraphSimulators, inner_graph_words
from bitwright.artifact.sites import simulators_in
from bitwright.common import ExportBackend
from bitwright.config.spec import CompressionSimulatorBase
from bitwright.errors import BitwrightError, BitwrightWarning, TraceError
from bitwright.export.asked_sizes import for_asked_sizes, left_out_words
from bitwright.export.decomposing import quick_decompositions
from bitwright.planning import Problem, Severity
from bitwright.program.dynamic_marks import inputs_unmarked
from bitwright.program.export_errors import UnknownClassError, not_a_tuple, sizes_refused, unknown_class
from bitwright.program.exporting import exported
from bitwright.program.free_batch import write_batch_in_graph
from bitwright.program.keyword_names import keywords_read
from bitwright.program.unlift import reserved_state

__all__ = [
    "OTHER_OPERATOR", "ConversionError", "captured", "converting", "finalized_copy", "is_prepared_graph", "module_path",
    "own_warnings_passed_on", "places_by_operator", "plain_layout", "refuse_finalized", "refuse_inner_graphs",
    "refuse_missing",
]  # fmt: skip

OTHER_OPERATOR = "The float model has it: write it with other operators there, or choose another target."
"""What to do where the converter refuses the float model."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOST = re.compile(r"target (\S+) references nonexistent attribute")
_FINALIZED = re.compile(r"\bcoreai(\.|::)\w+")
_OF_COREAI = ("coreai-torch", "The Core AI runtime")
"""Converters whose errors name Core AI's operators for any model."""
_PREPARED_REMEDY = (
    "Give the exporter the prepared model; for a second backend, finalize(copy.deepcopy(prepared), backend=...)."
)
_FINALIZED_REMEDY = f"It was finalized for Core AI, whose operators no other target has. {_PREPARED_REMEDY}"
_FIXED = re.compile(r"inferred a static shape of (\d+) for dimension (\S+\])")
"""What torch.export says of a size that varies by ``Dim.DYNAMIC``, and that the program has one value of."""
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_OF_THE_DISK = {
    getattr(errno, name)
    for name in (
        *(
            "EACCES",
            "EDQUOT",
            "EFBIG",
            "EIO",
            "EISDIR",
            "ELOOP",
            "EMFILE",
            "ENAMETOOLONG",
            "ENFILE",
            "ENOSPC",
            "ENOTDIR",
        ),
        *("ENOTEMPTY", "EPERM", "EROFS"),
    )
    if hasattr(errno, name)  # not every system has all of them
}
"""Errors of files that cannot be written, whatever the model."""
_GROUPED_EXPERTS = ("grouped_mm", "histc")  # ops by which transformers sorts tokens by expert


class ConversionError(BitwrightError, RuntimeError):
    """The converter of a target cannot take the model; the message has its words and says what to do.

    Attributes:
        problems: one for each place that is known, as a plan for the target has them.
    """

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (Problem("target", "the model itself", message, Severity.ERROR),)


@contextlib.contextmanager
def converting(converter: str, remedy: str | None = None) -> Iterator[None]:
    """Run somebody else's converter: what it prints is dropped, what it raises becomes a ``ConversionError``.

    Of the warnings that come meanwhile, those of Bitwright are passed on afterwards.

    Args:
        converter: its name, to begin the message with.
        remedy: what to do, to end the message with; None for advice on a compressed model.

    Raises:
        ConversionError: the block raised anything but an error of Bitwright or an ``ImportError``.
        OSError: a file cannot be written, for the disk is full for example.
        BitwrightWarning: the user has such warnings raised.
    """
    try:
        with own_warnings_passed_on(), _output_dropped(), quick_decompositions(), keywords_read(), torch.no_grad():
            yield
    except (TraceError, UnknownClassError) as error:
        raise ConversionError(str(error)) from error
    except (BitwrightError, BitwrightWarning, ImportError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        _raise_of_the_disk(error)
        unknown = next(filter(None, map(unknown_class, _chain(error))), None)
        if unknown is not None:
            raise ConversionError(str(unknown)) from error
        place, operator = _place(error)
        where = f" (at {operator} in {place or 'the model itself'})" if operator else ""
        advice = _sizes_remedy(error) or remedy or _remedy(error, converter)
        message = f"{converter} cannot take this model: {_words(error)}{where}. {advice}"
        problem = Problem("target", place or "the model itself", message, Severity.ERROR)
        raise ConversionError(message, (problem,)) from error


def _raise_of_the_disk(error: Exception) -> None:
    """Raise an error of a file that cannot be written as what it is."""
    if isinstance(error, shutil.Error):  # of a folder that was copied: it has the numbers in its words only
        number = _NUMBER.search(str(error))
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        raise error


@contextlib.contextmanager
def own_warnings_passed_on() -> Iterator[None]:
    """Drop the warnings of a block, but those of Bitwright, which are passed on afterwards, each once."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", BitwrightWarning)
            yield
    finally:
        for one in {str(one.message): one for one in caught}.values():
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@contextlib.contextmanager
def _output_dropped() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def places_by_operator(calls: Iterable[fx.Node]) -> dict[str, list[str]]:
    """Return the paths of the modules that make some calls, by the operator that the model has there."""
    places: dict[str, list[str]] = {}
    for node in calls:
        places.setdefault(str(node.meta.get("original_aten") or node.target), []).append(module_path(node))
    return places


def refuse_missing(converter: str, missing: Mapping[str, Iterable[str]], what: str = "translation of") -> None:
    """Refuse operators that a converter does not translate.

    Args:
        converter: its name, to begin messages with.
        missing: module paths by operator.
        what: it lacks of them.

    Raises:
        ConversionError: ``missing`` is not empty; with a problem for each operator.
    """
    problems = []
    for op, paths in missing.items():
        places = list(dict.fromkeys(path or "the model itself" for path in paths))
        listed = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        words = f"it has no {what} the operator {op}, which is called in {listed}"
        remedy = _FINALIZED_REMEDY if _FINALIZED.search(op) else OTHER_OPERATOR
        message = f"{converter} cannot take this model: {words}. {remedy}"
        problems.append(Problem("target", places[0], message, Severity.ERROR))
    if problems:
        raise ConversionError("\n".join(problem.message for problem in problems), tuple(problems))


def refuse_finalized(model: nn.Module, backend: ExportBackend | None = None) -> None:
    """Refuse a model in a target's own form, whose weights and activations no other target could tell.

    Args:
        model: what is to be written.
        backend: the one whose form is wanted; None for none.

    Raises:
        ConversionError: the model, or a part of it, was finalized for another backend.
    """
    target = finalized_for(model)
    if target is not None and (backend is None or target != backend.value):
        raise ConversionError(f"{finalized_words(target)} {_PREPARED_REMEDY}")


def module_path(node: Any) -> str:
    """Return the path of the module that calls an operator, from a graph of PyTorch or of coremltools."""
    if isinstance(node, fx.Node):
        stack = list((node.meta.get("nn_module_stack") or {"": ("",)}).values())
        return re.sub(r"^L\['self'\]\.?", "", str(stack[-1][0]))
    names, _ = node.get_scope_info()  # the first one is the module that makes results flat, the last one the operator
    return ".".join([name for name in names[:-1] if name][1:])


def _place(error: BaseException) -> tuple[str, str]:
    """The module and the operator that a converter was at, by the node that it held; empty where that is not known."""
    path, operator, trace = "", "", error.__traceback__
    while trace is not None:
        node: Any = trace.tb_frame.f_locals.get("node")
        if isinstance(node, fx.Node) or hasattr(node, "get_scope_info"):
            with contextlib.suppress(Exception):  # only for the message
                path, operator = module_path(node), str(node.target if isinstance(node, fx.Node) else node.kind)
        trace = trace.tb_next
    return path, operator


def _words(error: Exception) -> str:
    """What converters say first, and what they say it was caused by, without the colours of a terminal."""
    chain = _chain(error)
    found = [_first_lines(error)] + ([f"(because of {_first_lines(chain[-1])})"] if len(chain) > 1 else [])
    return " ".join(found)


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    text = " ".join(lines[:3])[:400].rstrip(".") if lines else "no message"
    return f"{type(error).__name__}: {text}"


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _sizes_remedy(error: Exception) -> str | None:
    """What to do where a program does not hold for all sizes that ``dynamic_shapes`` has, with what torch suggests."""
    fixed = dict.fromkeys(f"{one[2]} is {one[1]}" for part in _chain(error) for one in _FIXED.finditer(str(part)))
    if fixed:
        return (
            f"The program holds for fewer sizes than dynamic_shapes has: {', '.join(fixed)} and nothing else. Leave "
            "such a size out of dynamic_shapes, which makes it the example's. If it may vary in the float model, "
            "calibrated activations in blocks fix it, which have parameters for each place: quantize those per tensor, "
            "per channel, or with qparam_calculator_cls='dynamic'."
        )
    refusal = next(filter(sizes_refused, _chain(error)), None)
    if refusal is None:
        return None
    _, _, fixes = str(refusal).partition("Suggested fixes:")
    suggested = "; ".join(itertools.takewhile(lambda line: " = " in line, map(str.strip, fixes.strip().splitlines())))
    return (
        "The program holds for fewer sizes than dynamic_shapes has: give those that it holds for"
        + (f", as torch.export suggests ({suggested})" if suggested else ", such as a Dim with min and max")
        + ", or leave such a size out of dynamic_shapes, which makes it the example's."
    )


def _remedy(error: Exception, converter: str) -> str:
    lost = next(filter(None, (_LOST.search(str(part)) for part in _chain(error))), None)
    if lost is not None:
        return _rename(lost[1])
    if converter not in _OF_COREAI and any(_FINALIZED.search(str(part)) for part in _chain(error)):
        return _FINALIZED_REMEDY
    general = (
        "Try it with the float model: if that fails too, the model uses an op that the converter lacks; if not, "
        "leave the layers at fault out of the configuration."
    )
    if not any(op in str(part) for part in _chain(error) for op in _GROUPED_EXPERTS):
        return general
    return (
        f"{general} Mixtures of experts of transformers sort tokens by expert, which few converters know; with "
        "config._experts_implementation = 'batched_mm', set before the model is made, they do not."
    )


def captured(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Return the exported program of what is to be written.

    Args:
        model: in the form of its target.
        example_inputs: positional inputs.
        example_kwargs: keyword inputs.
        dynamic_shapes: as for ``torch.export``.

    Raises:
        ConversionError: torch.export cannot capture the model, what it captures cannot be run, or leaves out some of
            the sizes that ``dynamic_shapes`` has.
        TypeError: ``example_inputs`` is no tuple.
    """
    if not isinstance(example_inputs, tuple):
        raise not_a_tuple(example_inputs)
    args, kwargs = tree_map_only(torch.Tensor, plain_layout, (example_inputs, dict(example_kwargs or {})))
    capture = partial(exported, model, args, kwargs, dynamic_shapes=dynamic_shapes)
    with converting("torch.export"), inputs_unmarked(args, kwargs):
        if dynamic_shapes:
            program, left_out = for_asked_sizes(capture, model, args, kwargs, dynamic_shapes)
        else:
            program, left_out = capture(), []
    if left_out:
        raise ConversionError(f"torch.export cannot take this model. {left_out_words(left_out)}")
    lost = reserved_state(program)
    if lost is not None:
        raise ConversionError(f"torch.export cannot take this model. {_rename(lost)}")
    return program


def plain_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as programs take them: contiguous, or channels last."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor
    channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if channels_last else tensor.contiguous()


def _rename(state: str) -> str:
    return (
        f"Graph modules have something of their own named {state.partition('.')[0]!r}, so that a program cannot be run "
        f"with the state {state!r}: rename that attribute of the model and prepare it again."
    )


def is_prepared_graph(model: nn.Module) -> bool:
    """Whether simulators stand in the model's graph, not at its modules; true for a captured graph without any.

    Graphs of others, such as an exported program's, are modules like any other.
    """
    from bitwright.program.graph_module import TracedGraphModule

    if not isinstance(model, fx.GraphModule):
        return False
    called = (node.target for node in model.graph.nodes if node.op == "call_module")
    in_graph = any(isinstance(model.get_submodule(str(name)), CompressionSimulatorBase) for name in called)
    return in_graph or (isinstance(model, TracedGraphModule) and not simulators_in(model))


def refuse_inner_graphs(model: nn.Module) -> None:
    """Raise if a prepared graph stands inside a model.

    Raises:
        ConversionError: one does; names it.
    """
    inside = inner_graph_words(model)
    if inside:
        raise ConversionError(f"{inside} Export the graph itself, or prepare the whole model.")


def finalized_copy(model: nn.Module, backend: ExportBackend) -> nn.Module:
    """Return a prepared model in the form of ``backend``; the model itself is not changed.

    Raises:
        ValueError: the backend cannot hold a weight or an activation.
        NotImplementedError: activations whose parameters are computed at run time.
        ArtifactError: a weight cannot be stored, or an activation was not calibrated.
        MissingExtraError: the backend's library is not installed.
        ConversionError: the model was finalized for another backend.
    """
    refuse_finalized(model, backend)
    refuse_inner_graphs(model)
    if not is_prepared_graph(model):
        from .eager import finalize_eager

        return finalize_eager(copy.deepcopy(model).eval(), backend).eval()
    from bitwright.quantization._graph.finalize import folded_copy

    from .graph import finalize_graph

    twin: fx.GraphModule = folded_copy(model)  # type: ignore[arg-type]
    write_batch_in_graph(twin)
    found = GraphSimulators.of(twin)
    if found.weights or found.activations:
        return finalize_graph(twin, backend)
    twin.recompile()
    return twin
