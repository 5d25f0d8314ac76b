"""Put the simulators of an eager plan into the model, or take them out again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from bitwright._utils.forward_scope import wrap_forward
from bitwright._utils.own_states import list_own_states
from bitwright._utils.parametrization import parametrize_tensor
from bitwright.config.matching import ModuleRule
from bitwright.kernels.layout import SMALL
from bitwright.planning import Placement, Plan, Site
from bitwright.planning.ops import QUANTIZER_EAGER_OPS
from bitwright.program import ModuleCall, Op, Program
from bitwright.quantization.spec import QuantizationComponentFactory, QuantizationSpec, RunningRangeMixin
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from .children import Children
from .interception import CallSites, CallTable, FrameScope, OpScope, ShieldScope, UnreachedScope
from .unreached import unreached_modules

__all__ = ["Insertion"]

# Which function a layer's kernel for inference would have to apply, 0 where it has none. Nothing else reads it.
_FAST_PATH = "activation_relu_or_gelu"
# Whether an encoder makes a nested tensor of a padded input.
_NESTED = "use_nested_tensor"


class Insertion:
    """The change made to a model, with the way back.

    Attributes:
        simulators: every simulator with the placement that it came from, in the order of the plan.

    Args:
        model: is changed in place.
        program: what was traced of it.
        plan: the simulators.
        rules: which config entry owns each module.
    """

    def __init__(self, model: nn.Module, program: Program, plan: Plan, rules: Mapping[str, ModuleRule]) -> None:
        self.simulators: list[tuple[FakeQuantizeImplBase, Placement]] = []
        self._model = model
        self._program = program
        self._modules = dict(model.named_modules())
        self._undo: list[Callable[[], Any]] = []
        self._tables: dict[str, CallTable] = {}
        self._scopes: dict[str, OpScope] = {}
        unreached = list(unreached_modules(model, program.calls, rules))
        sites = (site for placement in plan.placements for site in placement.sites)
        self._framed = {site.op.module_path for site in sites if self._is_inside(site)}
        built = [(_build(placement), placement) for placement in plan.placements]
        try:
            for simulator, placement in built:
                if placement.state is not None:
                    self._insert_weight(simulator, placement)
                else:
                    for site in placement.sites:
                        self._insert_activation(simulator, site)
                self.simulators.append((simulator, placement))
            self._attach_frames()
            self._watch(unreached)
            listed, readers = ([self._modules[path] for path in paths] for paths in (program.listed, program.readers))
            self._undo += list_own_states(listed, readers)
            self._keep_off_the_fast_path()
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put the model back to what it was before."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _insert_weight(self, simulator: FakeQuantizeImplBase, placement: Placement) -> None:
        assert placement.state is not None
        simulator.tensor_fqn = placement.state.name
        for path, attribute in placement.state.owners:
            module = self._modules.get(path)
            if module is None:  # an alias of a module that is already done under its canonical name
                continue
            self._undo.append(parametrize_tensor(module, attribute, simulator))
            call = self._program.calls.get(path)
            large = placement.state.tensor.numel() >= SMALL
            if call is not None and large and path not in self._framed and _is_single_op(module, call):
                self._scope_of(module, call)  # which has the op forget the quantized weight

    def _insert_activation(self, simulator: FakeQuantizeImplBase, site: Site) -> None:
        op = site.op
        role = site.argument.label if site.argument is not None else f"output_{site.output_index}"
        child = f"{op.call}_quantize_{role}"
        module = self._modules[op.module_path]
        calculator = simulator.qparams_calculator
        if isinstance(calculator, RunningRangeMixin):
            calculator.tensors_per_step = self._program.calls[op.module_path].times
        simulator.tensor_fqn = f"{op.module_path}.{child}" if op.module_path else child
        # Not add_module: it refuses a name that a wrapper finds in a prepared module inside it.
        if child in {*module.__dict__, *module._parameters, *module._buffers, *module._modules}:
            where = op.module_path or type(module).__name__
            raise ValueError(f"{where!r} has an attribute {child!r} already; a simulator takes that name. Rename it.")
        module._modules[child] = simulator
        self._undo.append(lambda: module._modules.pop(child, None))
        if not self._wrap_single_op(module, self._program.calls[op.module_path], site, child):
            self._add_to_table(op, site, child)

    def _is_inside(self, site: Site) -> bool:
        """Whether a value crosses no boundary of the module that reads it, as a weight that a hook has computed."""
        call = self._program.calls[site.op.module_path]
        return site.value not in (call.inputs if site.argument is not None else call.outputs)

    def _wrap_single_op(self, module: nn.Module, call: ModuleCall, site: Site, child: str) -> bool:
        if not _is_single_op(module, call) or call.path in self._framed:
            return False
        index = (call.inputs if site.argument is not None else call.outputs).index(site.value)
        scope = self._scope_of(module, call)
        if site.argument is not None:
            scope.inputs.append((index, call.input_names[index], child))
        else:
            scope.outputs.append((index, child))
        return True

    def _scope_of(self, module: nn.Module, call: ModuleCall) -> OpScope:
        """The scope around a module that is one op; put there if it is not there yet."""
        scope = self._scopes.get(call.path)
        if scope is None:
            scope = self._scopes[call.path] = OpScope(module)
            self._undo.append(wrap_forward(scope))
        return scope

    def _add_to_table(self, op: Op, site: Site, child: str) -> None:
        table = self._tables.setdefault(op.module_path, CallTable(op.module_path))
        sites = table.sites.setdefault(op.call, CallSites.of(op.type))
        if site.argument is not None:
            sites.arguments.append((site.argument.index, site.argument.name, site.argument.item, child))
        else:
            assert site.output_index is not None
            sites.outputs.append((site.output_index, child))
        self._hide(self._modules[op.module_path], child)

    def _hide(self, module: nn.Module, child: str) -> None:
        """Keep a simulator from a forward that goes over the module's children."""
        children = module._modules
        if not isinstance(children, Children):
            module._modules = children = Children(children)
            self._undo.append(lambda: setattr(module, "_modules", dict(module._modules)))
        children.hidden.add(child)

    def _attach_frames(self) -> None:
        shielded: set[str] = set()
        for path, table in self._tables.items():
            call = self._program.calls[path]
            planned = {base for base, _ in map(_split_call, table.sites)}
            table.seen = _count(op.type for op in call.ops if op.type in QUANTIZER_EAGER_OPS or op.type in planned)
            for op in call.ops:
                if op.type in table.seen:
                    table.written_in.setdefault(op.type, []).append(op.written_in)
            once = [op for op in self._program.computed_once if op.module_path == path]
            table.once.update((op.type, op.written_in) for op in once if op.written_in is not None)
            shielded.update(child for child in call.children if child not in self._tables)
            self._undo.append(wrap_forward(FrameScope(self._modules[path], table)))
        for path in sorted(shielded - self._scopes.keys()):
            self._undo.append(wrap_forward(ShieldScope(self._modules[path])))

    def _watch(self, unreached: Iterable[tuple[str, nn.Module, bool]]) -> None:
        """Have modules that the example inputs did not come to say so when they are called after all."""
        tables: dict[str, CallTable] = {}
        for path, module, quantized in unreached:
            table = tables.setdefault(path, CallTable(path, unreached=True))
            self._undo.append(wrap_forward(UnreachedScope(module, table) if quantized else ShieldScope(module)))

    def _keep_off_the_fast_path(self) -> None:
        """Have torch's encoder layers call what is in them: their kernel for inference computes all of it at once.

        They leave it out while a function mode is in force, but not under ``torch.compile``, nor where only modules in
        them have simulators. Encoders make nested tensors of padded inputs for that kernel, which no simulator takes.
        """
        watched = [*self._tables, *self._scopes]
        activations = (placement for _, placement in self.simulators if placement.state is None)
        simulated = [site.op.module_path for placement in activations for site in placement.sites]
        for path, module in self._modules.items():
            if isinstance(module, nn.TransformerEncoderLayer) and _is_at_or_above(path, watched):
                self._set(module, _FAST_PATH, 0)
            if isinstance(module, nn.TransformerEncoder) and _is_at_or_above(path, simulated):
                self._set(module, _NESTED, False)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Give an attribute another value, if the module has it."""
        if hasattr(module, name):
            self._undo.append(partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, value)


def _is_at_or_above(path: str, others: Iterable[str]) -> bool:
    """Whether a module is one of some others, or holds one."""
    return any(inner == path or not path or inner.startswith(f"{path}.") for inner in others)


def _build(placement: Placement) -> FakeQuantizeImplBase:
    assert isinstance(placement.spec, QuantizationSpec)
    uses = placement.state.uses if placement.state is not None else placement.sites
    extra = {"op_to_optimize": uses[0].op.target} if uses else {}
    build = QuantizationComponentFactory.create_fake_quantizer_partial(placement.spec, placement.target)
    simulator: FakeQuantizeImplBase = build(**extra)
    return simulator


def _is_single_op(module: nn.Module, call: ModuleCall) -> bool:
    """True for torch's own modules whose forward is one call, so that the module's boundary is the op's.

    Not for recurrent layers: a pair of states goes in and comes out as a tuple, whose entries the op has one by one.
    """
    source = getattr(type(module).forward, "__module__", "") or ""
    if not source.startswith("torch.nn.modules") or len(call.ops) != 1 or call.children:
        return False
    return all(argument.item is None for argument in call.ops[0].arguments)


def _split_call(call: str) -> tuple[str, int]:
    base, _, number = call.rpartition("_")
    return (base, int(number)) if base and number.isdigit() else (call, 0)


def _count(names: Any) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return dict(counts)
