"""Physical removal of channels that pruning has made constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.full_precision import full_precision
from bitwright._utils.parametrization import clear_parametrization, own_parametrizations
from bitwright._utils.weight_simulators import simulator_places
from bitwright.planning.simulated_states import trace_weights
from bitwright.program.export_errors import not_a_tuple

from ._channel_constants import Constants
from ._channel_moves import widths
from ._channel_spaces import Reader, Space, Tensor
from ._channel_trial import OutputDiffersError, Trial, run
from ._channels import CONVS, TRANSPOSED, ChannelAnalysis
from .spec import PruneImplBase

__all__ = ["ShrinkReport", "shrink"]


_UNCUT = "its weight is read more than once, or compressed in another way too"


@dataclass(slots=True)
class ShrinkReport:
    """What :func:`shrink` did.

    Attributes:
        removed: by path of a layer, how many output channels it had and has.
        kept: by path of a layer with output channels of zeros that had to stay, why.
        parameters_before: entries of all parameters before.
        parameters_after: entries of all parameters now.
    """

    removed: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0

    def __str__(self) -> str:
        lines = [f"{path}: {before} -> {after} channels" for path, (before, after) in self.removed.items()]
        lines += [f"{path}: channels stay, because {reason}" for path, reason in self.kept.items()]
        share = self.parameters_after / max(self.parameters_before, 1)
        return "\n".join([*lines, f"{self.parameters_before:,} -> {self.parameters_after:,} parameters ({share:.1%})"])


def shrink(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    keep: Collection[str] = (),
) -> ShrinkReport:
    """Remove output channels whose weights are all zero, in place, with everything that belongs to them.

    Such a channel is constant. What the layers that read it make of the constant goes into their bias, and the channel
    goes from every tensor that has it: the layer itself, batch norms, depthwise convolutions, the readers, both
    branches of a residual add. Channels stay where the graph does not allow it: at the output of the model, where ops
    mix channels, where a constant other than zero meets padding, or depends on the number or the values of the inputs.

    Masks on weights that are not compressed otherwise are made permanent, and their simulators removed. All that is
    first done to a copy, whose output on the example inputs in eval mode must be the model's.

    Args:
        model: a module, pruned by :class:`~bitwright.pruning.MagnitudePruner` or otherwise; no captured graph.
        example_inputs: positional inputs of the model.
        example_kwargs: keyword inputs of the model.
        keep: paths of layers, or of modules around them, whose output channels stay.

    Raises:
        TypeError: the model is a captured graph, whose sizes are fixed, or ``example_inputs`` is no tuple.
        ValueError: a path in ``keep`` names no module, or the example inputs hold no sample.
        RuntimeError: the model's forward raised, or would raise or return something else with fewer channels, which
            names the layers to blame; the model is as it was.
    """
    kwargs = dict(example_kwargs or {})
    _check_arguments(model, example_inputs, keep)
    traced = trace_weights(model, example_inputs, kwargs, every_call=True)
    before = run(model, example_inputs, kwargs)
    analysis = ChannelAnalysis(traced.program, model, _cuttable_weight, _count_calls(model, example_inputs, kwargs))
    report = ShrinkReport(kept=dict.fromkeys(analysis.uncut, _UNCUT), parameters_before=_count(model))
    _keep(analysis.spaces, keep)
    readers = [reader for space in analysis.spaces for reader in space.readers]
    constants = Constants(model, readers, example_inputs, kwargs)
    cuts = [_Cut(space, _removable(space, constants, report)) for space in analysis.spaces]

    def apply(target: nn.Module, chosen: Sequence[_Cut]) -> None:
        _apply(target, chosen, constants.values)

    trial = Trial(model, apply, before, example_inputs, kwargs)
    failure = trial.failure(cuts)
    if failure is not None:
        raise _refusal(trial, [cut for cut in cuts if bool(cut.removable.any())], failure) from failure
    apply(model, cuts)
    report.removed = _removed(cuts)
    report.parameters_after = _count(model)
    return report


def _check_arguments(model: nn.Module, example_inputs: Any, keep: Collection[str]) -> None:
    if not isinstance(example_inputs, tuple):
        raise not_a_tuple(example_inputs)
    if isinstance(model, fx.GraphModule):
        raise TypeError(
            "shrink() takes the module itself, not a captured graph, in which sizes are fixed. Prune and shrink the "
            "module first, and capture or prepare it in graph mode afterwards."
        )
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    if isinstance(keep, str) or not paths.issuperset(keep):
        wrong = repr(keep) if isinstance(keep, str) else ", ".join(sorted(repr(p) for p in keep if p not in paths))
        raise ValueError(f"keep takes a list of paths of modules, as in model.named_modules(), which {wrong} is not.")


def _keep(spaces: list[Space], paths: Collection[str]) -> None:
    for space in spaces:
        if any(writer == path or writer.startswith(f"{path}.") for writer in space.writers for path in paths):
            space.fix("keep names them")


def _refusal(trial: Trial[_Cut], cuts: list[_Cut], failure: Exception) -> RuntimeError:
    """Return the error that says which layers' channels cannot go."""
    blamed = trial.to_blame(cuts) if cuts else []
    layers = list(dict.fromkeys(path for cut in blamed for path in cut.space.writers))
    kind = "" if isinstance(failure, OutputDiffersError) else f"{type(failure).__name__}: "
    return RuntimeError(
        f"Without the channels of {layers}, the model would not compute what it does: {kind}{failure}. Its forward "
        "depends on their number or order in a way that the trace does not show, such as a size that is written into "
        f"the code. Nothing was removed. Pass keep={layers} to shrink the other layers."
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A space and the channels of it that go, bool ``[C]``."""

    space: Space
    removable: torch.Tensor


def _removed(cuts: list[_Cut]) -> dict[str, tuple[int, int]]:
    """Return how many channels each layer that loses some has and will have."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for cut in cuts:
        for path in cut.space.writers:
            sizes[path][0] += cut.space.size
            sizes[path][1] += int((~cut.removable).sum())
    return {path: (before, after) for path, (before, after) in sizes.items() if after < before}


def _apply(model: nn.Module, cuts: Sequence[_Cut], constants: Mapping[str, torch.Tensor]) -> None:
    """Make masks permanent, fold constants into biases, and cut tensors."""
    _make_masks_permanent(model)
    going: dict[tuple[str, str, int], list[tuple[Tensor, torch.Tensor]]] = defaultdict(list)
    for cut in cuts:
        for reader in cut.space.readers:
            _fold(model.get_submodule(reader.path), reader, cut.removable, constants[reader.path])
        if bool(cut.removable.any()):
            for tensor in cut.space.tensors:
                going[tensor.path, tensor.attribute, tensor.axis].append((tensor, cut.removable))
    for (path, attribute, axis), stretches in going.items():
        _cut(model.get_submodule(path), attribute, axis, stretches)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _make_masks_permanent(model: nn.Module) -> None:
    made: dict[tuple[int, int], torch.Tensor] = {}  # tied weights stay tied
    for place in list(simulator_places(model, PruneImplBase)):
        if not place.in_module or len(place.stack) != 1:
            continue
        original = place.original
        key = id(original), id(place.simulator)
        if key not in made:
            with torch.no_grad():
                masked = place.simulator(original.detach())
            parameter = isinstance(original, nn.Parameter)
            made[key] = nn.Parameter(masked, original.requires_grad) if parameter else masked
        clear_parametrization(place.module, place.attribute)
        setattr(place.module, place.attribute, made[key])


def _cuttable_weight(path: str, layer: nn.Module) -> torch.Tensor | None:
    """Return a layer's weight with its masks applied; None if it is compressed otherwise."""
    chains = own_parametrizations(layer).items()
    if any(name != "weight" or any(not isinstance(s, PruneImplBase) for s in chain) for name, chain in chains):
        return None
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.detach()


def _count_calls(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each module runs; a module or weight with several names counts as one that must stay."""
    calls: dict[str, int] = defaultdict(int)
    handles = [
        module.register_forward_hook(lambda *_, path=path: calls.__setitem__(path, calls[path] + 1))
        for path, module in model.named_modules()
    ]
    try:
        run(model, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    owners: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        owner, _, _ = f".{path}".partition(".parametrizations.")  # where masked weights are kept
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(owner[1:])
    for paths in owners.values():
        if len(paths) > 1:
            calls.update(dict.fromkeys(paths, 2))
    return calls


def _removable(space: Space, constants: Constants, report: ShrinkReport) -> torch.Tensor:
    """Return the channels of a space that all readers see as constants and can do without, bool ``[C]``."""
    if not space.readers or space.fixed is not None:
        reason = space.fixed or "nothing that is known reads them"
        report.kept.update(dict.fromkeys(space.writers, reason))
        return torch.zeros(space.size, dtype=torch.bool)
    removable = torch.stack([reader.constant.cpu() for reader in space.readers]).all(0)
    for reader in space.readers:
        steady = constants.is_steady(reader)
        if bool((removable & ~steady).any()):
            removable = removable & steady
            reason = f"{reader.path} reads what depends on the inputs there, as by a size or a mean in the forward"
            report.kept.update(dict.fromkeys(space.writers, reason))
        values = constants.values[reader.path].cpu()[reader.entries].view(space.size, reader.repeats)
        blocked = removable & _meets_padding(reader, values)
        if bool(blocked.any()):
            removable = removable & ~blocked
            reason = f"{reader.path} pads, and some of them are constants other than zero"
            report.kept.update(dict.fromkeys(space.writers, reason))
    if bool(removable.all()):
        removable[:1] = False  # a layer without channels is none
    return removable


def _meets_padding(reader: Reader, values: torch.Tensor) -> torch.Tensor:
    """Return which channels have a constant other than zero where a reader's border sees zeros, bool ``[C]``."""
    padded = isinstance(reader.module, CONVS) and any(widths(reader.module.padding))
    if padded or isinstance(reader.module, TRANSPOSED):
        return (values != 0).any(1)
    return torch.zeros(len(values), dtype=torch.bool)


def _cut(module: Any, attribute: str, axis: int, stretches: list[tuple[Tensor, torch.Tensor]]) -> None:
    """Take channels out of stretches of a tensor's axis, each with the channels of it that go, bool ``[C]``."""
    old = getattr(module, attribute)
    if old is None:
        return
    kept = torch.ones(old.shape[axis], dtype=torch.bool)
    for tensor, removable in stretches:
        gone = removable.repeat_interleave(tensor.repeats)
        kept[tensor.offset : tensor.offset + len(gone)] &= ~gone
    new = old.detach().index_select(axis, kept.nonzero().flatten().to(old.device)).clone()
    setattr(module, attribute, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
    if attribute == "weight":
        _resize(module)


def _fold(layer: Any, reader: Reader, removable: torch.Tensor, constant: torch.Tensor) -> None:
    """Add to the bias of a reader what it makes of the channels that go."""
    places = torch.zeros(len(constant), dtype=torch.bool)
    places[reader.entries] = removable.repeat_interleave(reader.repeats)
    values = torch.where(places.to(constant.device), constant, 0.0)
    if not bool(values.any()):
        return
    weight = layer.weight.detach()
    with full_precision(weight.device):
        shift = weight.flatten(2).sum(2) @ values if weight.ndim > 2 else weight @ values
    if layer.bias is None:
        layer.bias = nn.Parameter(torch.zeros_like(shift), layer.weight.requires_grad)
    layer.bias = nn.Parameter(layer.bias.detach() + shift, layer.bias.requires_grad)


def _resize(module: Any) -> None:
    """Bring the sizes that a module remembers in line with its weight."""
    shape = module.weight.shape
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif isinstance(module, TRANSPOSED):
        module.in_channels, module.out_channels = shape[0], shape[1]
    elif isinstance(module, CONVS):
        depthwise = module.groups > 1
        module.out_channels = shape[0]
        module.in_channels = shape[0] if depthwise else shape[1]
        module.groups = shape[0] if depthwise else 1
    elif isinstance(module, nn.PReLU):
        module.num_parameters = shape[0]
    else:
        module.num_features = shape[0]
