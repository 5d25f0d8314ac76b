"""Turn a pruning spec and a weight into a resolved spec: axes filled in, shapes checked, bytes counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bitwright.common import CompressionType
from bitwright.program import Argument
from bitwright.pruning.spec import NMStructured, PruneImplBase, PruningSpec, Unstructured, _MagnitudePruneImpl
from bitwright.pruning.spec.errors import _BlockSizeMismatchError
from bitwright.pruning.spec.scheme import removed_units

from .ops import PRUNER_OPS, AxisConflictError, default_weight_axes
from .packed_sizes import bytes_under
from .plan import Problem, Severity
from .weight_only import WeightRequest, WeightResolution, WeightTechnique

__all__ = ["COLLECTED_OPS", "PruningTechnique", "ranks_rows"]

COLLECTED_OPS = frozenset(
    {"linear", "addmm", "multi_head_attention_forward"}
    | {f"{name}{dims}d" for name in ("conv", "conv_transpose") for dims in (1, 2, 3)}
)
"""Functions whose inputs calibration can collect."""


class PruningTechnique(WeightTechnique):
    """What is particular to pruning while planning."""

    kind = CompressionType.PRUNING
    ops = PRUNER_OPS

    def resolve(self, spec: PruningSpec, request: WeightRequest) -> WeightResolution:
        """Fill in the axis of an N:M pattern, check that the scheme fits, and count bytes."""
        scheme = spec.pruning_scheme
        if isinstance(scheme, NMStructured) and scheme.axis is None and request.axes is not None:
            scheme = scheme.model_copy(update={"axis": min(request.axes.block, len(request.shape) - 1)})
            spec = spec.model_copy(update={"pruning_scheme": scheme})
        try:
            scheme.check(request.shape)
        except _BlockSizeMismatchError as error:
            message = f"{error} ({request.rule}), so it stays dense. Choose a size that divides it."
            return WeightResolution(
                None, note="block size does not divide", problems=[Problem("block-size", request.state.name, message)]
            )
        except ValueError as error:
            message = f"{error} (asked for by {request.rule})."
            return WeightResolution(None, problems=[Problem("scheme", request.state.name, message, Severity.ERROR)])
        problems = [
            *_check_inputs(spec, request),
            *_check_scope(spec, request),
            *_check_emptiness(spec, request),
            *_check_target(spec, request),
            *_check_vectors(spec, request),
        ]
        size = bytes_under(request.stack, request.state.tensor, _count_kept(spec, request).entries)
        return WeightResolution(spec, (), size, problems=problems)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is left of a weight in the end.

    Attributes:
        units: units that stay: entries, blocks or channels.
        entries: entries of these.
    """

    units: int
    entries: int


def _count_kept(spec: PruningSpec, request: WeightRequest) -> _Kept:
    """Count what one weight keeps; where weights are ranked together that is an average."""
    units = spec.pruning_scheme.pool(torch.empty(request.shape, device="meta")).numel()
    rows = _channels(request) if ranks_rows(spec) else 1
    kept = rows * (units // rows - removed_units(units // rows, spec.final_sparsity))
    return _Kept(kept, kept * (math.prod(request.shape) // max(units, 1)))


def ranks_rows(spec: PruningSpec) -> bool:
    """Whether each output channel is ranked by itself, for which the weight must have an axis of these."""
    scope = spec.scope or spec.pruning_algo.default_scope
    return scope == "row" and isinstance(spec.pruning_scheme, Unstructured)


def _channels(request: WeightRequest) -> int:
    channel = 0 if request.axes is None else request.axes.channel
    return request.shape[channel] if len(request.shape) > 1 else 1


def _check_inputs(spec: PruningSpec, request: WeightRequest) -> list[Problem]:
    """An algorithm that looks at a layer's inputs needs ops whose inputs can be had."""
    if spec.pruning_algo.input_statistics == "none" or any(map(_has_inputs, request.state.uses)):
        return []
    message = (
        f"{PruneImplBase.get_key(spec.pruning_algo)!r} asked for by {request.rule} wants the inputs of the layer, "
        f"which are not collected for {', '.join(sorted({use.op.type for use in request.state.uses}))}; the weight is "
        "pruned by magnitude. Give it pruning_algo='default' to say so."
    )
    return [Problem("no-inputs", request.state.name, message)]


def _has_inputs(use: Argument) -> bool:
    return use.op.type in COLLECTED_OPS and use.name != "out_proj_weight"


def _check_scope(spec: PruningSpec, request: WeightRequest) -> list[Problem]:
    meaningless = (spec.scope == "row" and not isinstance(spec.pruning_scheme, Unstructured)) or (
        spec.scope == "global" and isinstance(spec.pruning_scheme, NMStructured)
    )
    algo = spec.pruning_algo
    if meaningless:
        message = (
            f"scope={spec.scope!r} has no meaning for the scheme {spec.pruning_scheme.describe()} ({request.rule}): "
            "rows are ranked for Unstructured() only, and an N:M pattern ranks within its groups. Leave scope out."
        )
    elif (spec.scope == "row" or (spec.scope or algo.default_scope) == "global") and not _has_scores(algo):
        ranked = "weights together" if (spec.scope or algo.default_scope) == "global" else "each output channel"
        message = (
            f"scope={spec.scope or algo.default_scope!r} ({request.rule}) ranks {ranked} by scores(), which "
            f"{algo.__name__} does not define beside its compute_mask(): that knows one whole weight at a time. Define "
            "scores(), or give it scope='tensor'."
        )
    elif ranks_rows(spec) and _has_no_rows(request):
        consumers = " and ".join(
            f"{use.op.type} ({use.op.name})" for use in (*request.state.uses, *request.state.views)
        )
        message = (
            f"output channels of it cannot be ranked one by one ({request.rule}): {consumers} take different "
            "dimensions for them. Give it scope='tensor'."
        )
    else:
        return []
    return [Problem("scope", request.state.name, message, Severity.ERROR)]


def _has_no_rows(request: WeightRequest) -> bool:
    """Whether the ops that read a weight disagree about its dimension of output channels."""
    try:
        default_weight_axes(request.state)
    except AxisConflictError:
        return True
    return False


def _has_scores(algo: type[PruneImplBase]) -> bool:
    """Whether an algorithm has scores for its masks: not where a subclass has only the latter of its own."""
    if algo.compute_mask is _MagnitudePruneImpl.compute_mask:
        return True
    defining = {name: next(base for base in algo.__mro__ if name in vars(base)) for name in ("scores", "compute_mask")}
    return defining["scores"] is not PruneImplBase and issubclass(defining["scores"], defining["compute_mask"])


def _check_emptiness(spec: PruningSpec, request: WeightRequest) -> list[Problem]:
    """A weight, or output channels of it, of which nothing can be left, is hardly meant."""
    if spec.final_sparsity == 0.0 or isinstance(spec.pruning_scheme, NMStructured):
        return []
    kept, channels = _count_kept(spec, request).units, _channels(request)
    target = f"target_sparsity={spec.target_sparsity!r}"
    if kept == 0:
        message = (
            f"{target} removes all of the weight ({request.rule}). Choose a target below 1, or take the module out of "
            "the model."
        )
        return [Problem("empty-weight", request.state.name, message)]
    scope = spec.scope or spec.pruning_algo.default_scope
    ranked_whole = scope == "tensor" and spec.pruning_algo.input_statistics != "gram"  # which ranks in blocks
    if isinstance(spec.pruning_scheme, Unstructured) and ranked_whole and kept < channels:
        message = (
            f"{target} keeps {kept} of {math.prod(request.shape)} entries, fewer than the {channels} output channels, "
            f"so at least {channels - kept} of them become zero ({request.rule}). Choose a smaller target, or "
            "scope='row'."
        )
        return [Problem("empty-channels", request.state.name, message)]
    return []


def _check_target(spec: PruningSpec, request: WeightRequest) -> list[Problem]:
    """An N:M pattern fixes the sparsity; say so if another one was asked for."""
    if "target_sparsity" not in spec.model_fields_set or spec.target_sparsity == spec.final_sparsity:
        return []
    message = (
        f"target_sparsity={spec.target_sparsity!r} has no effect ({request.rule}): the pattern "
        f"{spec.pruning_scheme.describe()} removes {spec.final_sparsity:.4g}. Leave it out, or choose another pattern."
    )
    return [Problem("target-sparsity", request.state.name, message)]


def _check_vectors(spec: PruningSpec, request: WeightRequest) -> list[Problem]:
    """A palette of vectors cannot hold what is left of them."""
    if spec.final_sparsity == 0.0 or all(getattr(simulator, "cluster_dim", 1) == 1 for simulator in request.stack):
        return []
    message = (
        f"pruning asked for by {request.rule} zeroes parts of a palette's vectors, so the weight is stored as floats. "
        "Palettize it with cluster_dim=1."
    )
    return [Problem("order", request.state.name, message)]
