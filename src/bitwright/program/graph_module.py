"""A ``GraphModule`` that switches between training and evaluation, and can be copied and pickled as a whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from bitwright._utils.direct_calls import Caller, DirectlyCalled, caller, pass_through
from bitwright._utils.forward_scope import ForwardScope
from bitwright._utils.missing_names import add_known_names
from bitwright.kernels.remade import forget_weight

from .free_batch import FREE_BATCH, graph_to_call
from .graph_record import GraphRecord, copy_graph
from .input_check import InputCheck
from .keyword_names import keywords_read
from .shared_simulators import part_where_states_differ
from .small_weights import SmallWeights, weights_simulated_once

__all__ = ["RESERVED_NAMES", "TracedGraphModule", "as_traced", "uncompiled_copy"]

# Set anew whenever the graph is; what refers to generated code is neither copied nor pickled. And the model that was
# captured, which the graph keeps alive, to be asked about batches of other sizes: copies, as finalized ones, do not.
_REBUILT = (
    "_graph",
    "_code",
    "_lineno_map",
    "_prologue_start",
    "_in_spec",
    "_out_spec",
    "_tracer_cls",
    "_small_weights",
    "_captured_model",
)


# What generated code calls instead of ops: the same ops by torch's own parsers of arguments, which take half the time.
# The graph keeps the ops.
_CALLED_AS = {
    f" = torch.ops.aten.{op}(": f" = torch.{function}("
    for op, function in (
        ("add.Tensor", "add"),
        ("chunk.default", "chunk"),
        ("gelu.default", "_C._nn.gelu"),
        ("layer_norm.default", "layer_norm"),
        ("linear.default", "_C._nn.linear"),
        ("relu.default", "relu"),
        ("reshape.default", "reshape"),
        ("scaled_dot_product_attention.default", "_C._nn.scaled_dot_product_attention"),
        ("transpose.int", "transpose"),
    )
}


class TracedGraphModule(fx.GraphModule):
    """The ops of an exported model in a module.

    Unlike the ``GraphModule`` of ``torch.export`` it keeps every attribute when it is copied, can be pickled, and
    follows ``train()`` and ``eval()``: ops that depend on the mode are submodules, so that switching costs what it
    costs for any module. Inputs are checked against the shapes that the graph was captured for.

    Args:
        root: holds the parameters, buffers and submodules; its children and tensors are taken over.
        graph: the ops.
        check: the check of the inputs, None for none.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, check: InputCheck | None = None) -> None:
        super().__init__(nn.Module(), _nothing(), TracedGraphModule.__name__)
        self._modules.update(root._modules)
        self._parameters.update(root._parameters)
        self._buffers.update(root._buffers)
        self._non_persistent_buffers_set |= root._non_persistent_buffers_set
        self.training = root.training
        self._set_graph(graph)
        self._input_check = check
        if check is not None:
            self.__dict__["_captured_model"] = check.origin.model
            self.register_forward_pre_hook(check, with_kwargs=True)

    def _set_graph(self, graph: fx.Graph) -> None:
        """Take over another graph; its code is generated at the first call, or by ``recompile``."""
        self._graph = graph
        graph.owning_module = self
        self.__dict__.pop("_code", None)
        type(self).forward = _generate_first

    def recompile(self) -> Any:
        """Generate the code of the graph as it is now."""
        self.__dict__["_small_weights"] = SmallWeights(weights_simulated_once(self._graph))
        called = graph_to_call(self)
        short = called.on_generate_code(
            lambda given: lambda body: _with_short_ways(body if given is None else given(body), self)
        )
        own, self._graph = self._graph, called
        try:
            with short, keywords_read():
                code = super().recompile()
        finally:
            self._graph = own
        if called is not own:  # torch.compile reads metadata of the graph's own nodes by the lines of their code
            places = {node.name: place for place, node in enumerate(own.nodes)}
            names = [node.name for node in called.nodes]
            lines: dict[int, int | None] = self._lineno_map or {}
            self._lineno_map = {
                line: None if place is None else places.get(names[place]) for line, place in lines.items()
            }
        return code

    def _callers(self) -> tuple[Caller, Caller, Mapping[str, Any], Callable[[Any], None]]:
        """What generated code calls simulators by (for an argument that is needed further, and for another), and more.

        The last is told of results of operations that may have kept a quantized weight.
        """
        return caller(), caller(last=True), self._modules, forget_weight

    def _quantized_weights(self, by: Caller) -> dict[str, torch.Tensor]:
        """Weights quantized before their turn, by their simulators' names; ``by`` is how simulators are called."""
        small: Any = self._small_weights
        return small.quantized(self) if by is pass_through else {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        part_where_states_differ(self, state_dict, prefix)
        add_known_names(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def code(self) -> Any:
        """The generated Python code; or the model's own tensor or submodule of that name."""
        for own in (self._modules, self._parameters, self._buffers):
            if "code" in own:
                return own["code"]
        if "_code" not in self.__dict__:
            self.recompile()
        return str(self._code)

    @property
    def _exported_training(self) -> bool:
        # The name that torchao's PT2E gives to the mode of an exported module.
        return self.training

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedGraphModule:
        twin = uncompiled_copy(self, memo)
        twin.recompile()
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        state = _lasting(self)
        return _rebuild, (GraphRecord.of(self.graph), state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


# A call of a module in generated code; what follows says that its argument is not used any more.
_MODULE_CALL = re.compile(r"^(\w+)(.*) = self\.(\w+)\((\w+)\)(;  \4 = None$)?", re.MULTILINE)
# A line that gives a variable its value.
_RESULT = re.compile(r"^(\w+)(?: : [^=]+)? = .*$", re.MULTILINE)
# A read of a tensor in generated code, and the steps to it: ``getattr(getattr(self, "0").block, "1").weight``.
_READ = re.compile(r"^(\w+) = ((?:getattr\()*self(?:\.\w+|, \"[^\"\\]+\"\))+)$", re.MULTILINE)
_STEP = re.compile(r', "([^"]+)"\)|\.(\w+)')
# Fewer weights gain nothing from being quantized together.
_WORTH_JOINING = 4
_CALLERS = "_bitwright_pass, _bitwright_pass_last, _bitwright_modules, _bitwright_forget"


def _with_short_ways(body: list[str], module: TracedGraphModule) -> list[str]:
    """Return lines of generated code with the calls of ``_CALLED_AS``, short reads, and direct calls of simulators."""
    directly = {name for name, child in module._modules.items() if isinstance(child, DirectlyCalled)}

    weights = weights_simulated_once(module.graph)
    if len(weights) < _WORTH_JOINING:
        weights = {}

    def direct(call: re.Match[str]) -> str:
        variable, annotation, name, argument, last = call.groups()
        if name not in directly:
            return call[0]
        way = f'_bitwright_pass{"_last" if last else ""}(_bitwright_modules["{name}"], {argument})'
        if name not in weights:
            return f"{variable}{annotation} = {way}{last or ''}"
        rest = f"\n{argument} = None" if last else ""
        return f'{variable} = _bitwright_weights.pop("{name}", None)\nif {variable} is None: {variable} = {way}{rest}'

    changed = []
    for line in body:
        start = line.find(" = torch.ops.aten.")
        called = line[start : line.find("(", start) + 1] if start >= 0 else ""
        changed.append(line.replace(called, _CALLED_AS[called], 1) if called in _CALLED_AS else line)
    text = _READ.sub(lambda read: _short_read(read, module), "".join(changed))
    if not directly:
        return [text]
    readers = _readers_of_weights(module.graph, directly)
    if readers:
        text = _RESULT.sub(lambda r: f"{r[0]}\n_bitwright_forget({r[1]})" if r[1] in readers else r[0], text)
    before = [f"{_CALLERS} = self._callers()\n"]
    if weights:
        before.append("_bitwright_weights = self._quantized_weights(_bitwright_pass)\n")
    return [*before, _MODULE_CALL.sub(direct, text)]


def _readers_of_weights(graph: fx.Graph, directly: Collection[str]) -> set[str]:
    """Return the names of operations that read what one of these simulators made of a weight."""
    found = set()
    for node in graph.nodes:
        if node.op == "call_function":
            made = (given for given in node.all_input_nodes if given.op == "call_module" and given.target in directly)
            if any(simulated.all_input_nodes[0].op == "get_attr" for simulated in made):
                found.add(node.name)
    return found


def _short_read(read: re.Match[str], module: nn.Module) -> str:
    """Return code that reads a tensor of a submodule from the dictionaries it lies in.

    By attributes each step would first look for what is not there: ``nn.Module`` answers only for what is missing.
    """
    variable, path = read.groups()
    *owners, name = [quoted or plain for quoted, plain in _STEP.findall(path)]
    owner: Any = module
    for step in owners:
        owner = owner._modules.get(step)
        if owner is None:
            return read[0]
    kept = next((place for place in ("_parameters", "_buffers") if owner.__dict__[place].get(name) is not None), None)
    if kept is None:
        return read[0]
    way = "".join(f'._modules["{step}"]' for step in owners)
    return f'{variable} = self{way}.{kept}.get("{name}")\nif {variable} is None: {variable} = {path}'


def uncompiled_copy(module: TracedGraphModule, memo: dict[int, Any]) -> TracedGraphModule:
    """Return a deep copy whose code is not generated yet; ``memo`` as for ``copy.deepcopy``."""
    twin = type(module).__new__(type(module))
    memo[id(module)] = twin
    nn.Module.__init__(twin)
    for key, value in _lasting(module).items():
        twin.__dict__[key] = copy.deepcopy(value, memo)
    twin._set_graph(copy_graph(module.graph))
    return twin


def _lasting(module: TracedGraphModule) -> dict[str, Any]:
    """What a copy of a module gets: not what is set anew with its graph, nor what only runs around its forward."""
    state = {key: value for key, value in module.__dict__.items() if key not in _REBUILT}
    if isinstance(state.get("forward"), ForwardScope):
        del state["forward"]
    return state


def _rebuild(record: GraphRecord, state: Mapping[str, Any]) -> TracedGraphModule:
    module = TracedGraphModule.__new__(TracedGraphModule)
    nn.Module.__init__(module)
    module.__dict__.update(state)
    # The check's hook has a number of the process that registered it, which another hook must not get in this one.
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(number + 1 for number in module._forward_pre_hooks)])
    module.graph = record.graph()
    return module


#: Names under which a graph module has attributes of its own, so that a graph cannot read a model's state there.
RESERVED_NAMES = (
    (set(dir(TracedGraphModule)) - set(dir(nn.Module)) - {"code"})
    | {"meta", "_graph", "_code"}
    | {"_small_weights", "_captured_model", FREE_BATCH}
)


def _generate_first(self: TracedGraphModule, *args: Any, **kwargs: Any) -> Any:
    self.recompile()
    return self.forward(*args, **kwargs)


def _nothing() -> fx.Graph:
    graph = fx.Graph()
    graph.output(())
    return graph


def as_traced(module: fx.GraphModule) -> TracedGraphModule:
    """Return a plain ``GraphModule`` (the body of a control-flow op) as one that can be pickled."""
    return module if isinstance(module, TracedGraphModule) else TracedGraphModule(module, module.graph)
