"""Give every simulator of a graph its first parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import fx, nn

from bitwright.config.spec import CompressionSimulatorBase, CompressionTargetTensor
from bitwright.planning.mutation import mutated_roots
from bitwright.program import Program, StateTensor
from bitwright.program.graph_module import TracedGraphModule
from bitwright.quantization._engine import ExampleInputs
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .batch_norm import WeightFold

__all__ = ["initialise", "observe", "simulators_of_graph", "tensor_of", "written_states"]


def initialise(module: TracedGraphModule, program: Program, example: ExampleInputs) -> None:
    """Observe weights directly and activations in one forward of the example inputs, in eval mode without gradients.

    Before, observers are on and fake quantization is off, as insertion leaves them; afterwards it is the other way
    round. States that the forward writes to are as before.
    """
    simulators = [child for child in module.modules() if isinstance(child, FakeQuantizeImplBase)]
    with _evaluating(module, program):
        seen: set[int] = set()
        for node, simulator in simulators_of_graph(module):
            if _is_weight(simulator) and id(simulator) not in seen:
                seen.add(id(simulator))
                simulator(tensor_of(module, node.args[0]))
                simulator.disable_observer()
        if not all(map(_is_weight, simulators)):
            with _restored(program):
                module(*example.args, **example.kwargs)
        _remove_masked(module)
    for simulator in simulators:
        simulator.enable_fake_quant()
        if not _is_weight(simulator):
            simulator.disable_observer()


def observe(
    module: TracedGraphModule, program: Program, example: ExampleInputs, observing: Sequence[FakeQuantizeImplBase]
) -> None:
    """Let simulators of activations, which observe and do not quantize yet, see one more forward of the float model.

    Afterwards they quantize and do not observe, as all others do, which quantize nothing in between.
    """
    simulators = [child for child in module.modules() if isinstance(child, FakeQuantizeImplBase)]
    for simulator in simulators:
        simulator.disable_fake_quant()
    with _evaluating(module, program), _restored(program):
        module(*example.args, **example.kwargs)
    for simulator in simulators:
        simulator.enable_fake_quant()
    for simulator in observing:
        simulator.disable_observer()


def _remove_masked(module: TracedGraphModule) -> None:
    """Take out simulators whose range spans half of all numbers that there are: they saw minus infinity's stand-ins."""
    removed = []
    for node, simulator in simulators_of_graph(module):
        if not _is_weight(simulator) and not simulator.is_stateless and _sees_sentinels(simulator, node.args[0]):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            module.graph.erase_node(node)
            module._modules.pop(str(node.target))
            removed.append(simulator.tensor_fqn)
    if removed:
        module.recompile()
        warnings.warn(
            f"{', '.join(removed)} not quantized: with the example inputs the numbers there reach those that stand for "
            "infinity in masks, and one scale for them would round everything else to zero.",
            stacklevel=6,
        )


def _sees_sentinels(simulator: FakeQuantizeImplBase, source: object) -> bool:
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    scale = simulator.calculate_qparams()[0]
    reach = float(scale.abs().max()) * (simulator.quant_max - simulator.quant_min) if scale.numel() else 0.0
    return reach >= 0.5 * torch.finfo(value.dtype).max


def simulators_of_graph(module: fx.GraphModule) -> list[tuple[fx.Node, FakeQuantizeImplBase]]:
    """Return the nodes that call simulators, with the simulators, in order of execution."""
    found = []
    for node in module.graph.nodes:
        if node.op == "call_module":
            child = module.get_submodule(str(node.target))
            if isinstance(child, FakeQuantizeImplBase):
                found.append((node, child))
    return found


def tensor_of(module: fx.GraphModule, node: object) -> torch.Tensor:
    """Return the tensor of a node that reads a state, masks or palettizes one, or folds a batch norm into it."""
    assert isinstance(node, fx.Node)
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        tensor: torch.Tensor = getattr(module.get_submodule(path), name)
        return tensor
    fold = module.get_submodule(str(node.target))
    assert isinstance(fold, WeightFold | CompressionSimulatorBase)
    arguments = [None if argument is None else tensor_of(module, argument) for argument in node.args]
    folded: torch.Tensor = fold(*arguments)
    return folded


def _is_weight(simulator: FakeQuantizeImplBase) -> bool:
    return simulator.quantization_target == CompressionTargetTensor.WEIGHT


def written_states(program: Program) -> list[StateTensor]:
    """Return the parameters and buffers that the ops of a graph write to, or may: those that an inner graph reads."""
    mutated = mutated_roots(program)
    states = {
        id(argument.value.state): argument.value.state
        for op in program.ops
        for argument in op.arguments
        if argument.value.state is not None
        and (id(argument.value) in mutated or isinstance(op.target, torch._ops.HigherOrderOperator))
    }
    return list(states.values())


@contextlib.contextmanager
def _evaluating(module: nn.Module, program: Program) -> Iterator[None]:
    """Eval mode without gradients, whose random numbers are not taken from the user's."""
    training = [child for child in module.modules() if child.training]
    if training:
        module.eval()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(program)), torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True


@contextlib.contextmanager
def _restored(program: Program) -> Iterator[None]:
    saved = [(state.tensor, state.tensor.detach().clone()) for state in written_states(program)]
    try:
        yield
    finally:
        for tensor, before in saved:
            tensor.copy_(before)


def _cuda_devices(program: Program) -> list[int]:
    devices = {state.tensor.device for state in program.states.values()}
    return sorted(device.index or 0 for device in devices if device.type == "cuda")
