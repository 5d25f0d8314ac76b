"""Where simulators stand in a graph, what they do, what they are called, and what they learn: as in coreai-opt."""

from __future__ import annotations

from typing import Any

import pytest
from _peer import both, requires_peer

L = "nn.Linear(8, 8)"
X = "torch.randn(2, 8)"
IMAGE = "torch.randn(2, 4, 8, 8)"
A4 = {"*": {"dtype": "int4"}}
BLOCKS_OF_3 = {"*": {"dtype": "int4", "granularity": {"type": "per_block", "axis": 1, "block_size": 3}}}
PER_CHANNEL = {"*": {"granularity": {"type": "per_channel", "axis": 1}}}
BLOCK = {
    "c": "nn.Conv2d(4, 4, 3, padding=1)",
    "b": "nn.BatchNorm2d(4)",
    "d": "nn.Conv2d(4, 4, 1, bias=False)",
    "e": "nn.BatchNorm2d(4)",
}


def case(forward: str, inputs: str = X, config: dict[str, Any] | None = None, **modules: str) -> dict[str, Any]:
    """A model (its submodules, and ``forward`` as an expression of ``s`` and ``x``), its input, and a config."""
    return {"forward": forward, "modules": modules, "inputs": inputs, "config": config}


def everywhere(**fields: Any) -> dict[str, Any]:
    """A config whose global part has ``fields``."""
    return {"global_config": fields}


def named(**configs: dict[str, Any]) -> dict[str, Any]:
    """A config with the default global part and parts for modules by name, the last one the strongest."""
    return {"global_config": {}, "module_name_configs": configs}


SAME = {
    "linear relu": case("F.relu(s.l(x))", l=L),
    "linear linear": case("s.m(s.l(x))", l=L, m=L),
    "silu": case("s.m(F.silu(s.l(x)))", l=L, m=L),
    "gelu": case("s.m(F.gelu(s.l(x)))", l=L, m=L),
    "mish": case("s.m(F.mish(s.l(x)))", l=L, m=L),
    "elu": case("s.m(F.elu(s.l(x)))", l=L, m=L),
    "sigmoid between": case("s.m(torch.sigmoid(s.l(x)))", l=L, m=L),
    "sigmoid last": case("torch.sigmoid(s.l(x))", l=L),
    "tanh last": case("torch.tanh(s.l(x))", l=L),
    "relu6 last": case("F.relu6(s.l(x))", l=L),
    "hardtanh symmetric": case("F.hardtanh(s.l(x), -3.0, 3.0)", l=L),
    "hardtanh to six": case("F.hardtanh(s.l(x), 0.0, 6.0)", l=L),
    "hardsigmoid": case("F.relu6(s.m(F.hardsigmoid(s.l(x))))", l=L, m=L),
    "leaky relu": case("F.leaky_relu(s.l(x))", l=L),
    "logsigmoid": case("F.logsigmoid(s.l(x))", l=L),
    "hardswish": case("F.hardswish(s.l(x))", l=L),
    "relu with two readers of its input": case("(lambda y: F.silu(s.l(y)) + y)(s.l(x))", l=L),
    "dropout": case("s.m(s.d(s.l(x)))", l=L, m=L, d="nn.Dropout(0.1)"),
    "transpose": case("s.m(s.l(x).transpose(0, 1))", l=L, m="nn.Linear(2, 3)"),
    "transposed input": case("s.m(x.t())", m="nn.Linear(2, 3)"),
    "permute clone slice": case("s.m(s.l(x).permute(1, 0).clone()[:, :1])", l=L, m="nn.Linear(1, 3)"),
    "permute, two readers": case("(lambda y: (s.m(y), y.abs()))(s.l(x).permute(1, 0))", l=L, m="nn.Linear(2, 3)"),
    "view": case("s.m(s.l(x).view(4, 4))", l=L, m="nn.Linear(4, 3)"),
    "relu view": case("s.m(F.relu(s.l(x)).view(4, 4))", l=L, m="nn.Linear(4, 3)"),
    "relu view squeeze unsqueeze": case("s.m(F.relu(s.l(x)).view(2, 1, 8).squeeze(1).unsqueeze(0))", l=L, m=L),
    "select expand": case("s.m(s.l(x)[0].expand(3, 8))", l=L, m=L),
    "reshape permute": case("s.l(x).reshape(1, 2, 2, 4).permute(0, 2, 1, 3)", l=L),
    "flatten": case("s.m(torch.flatten(x, 1))", "torch.randn(2, 2, 4)", m=L),
    "cat": case("s.m(torch.cat([s.l(x), x], 1))", l=L, m="nn.Linear(16, 3)"),
    "concat": case("s.m(torch.concat([s.l(x), x], 1))", l=L, m="nn.Linear(16, 3)"),
    "cat of sigmoid": case("torch.cat([s.l(x), torch.sigmoid(s.m(x))], 1)", l=L, m=L),
    "cat per channel": case(
        "torch.cat([s.l(x), torch.sigmoid(s.m(x))], 1)",
        config=everywhere(op_input_spec=PER_CHANNEL, op_output_spec=PER_CHANNEL),
        l=L,
        m=L,
    ),
    "add": case("s.l(x) + x", l=L),
    "add scalar": case("s.l(x) + 1.0", l=L),
    "add itself": case("(lambda y: y + y)(s.l(x))", l=L),
    "add in place": case("s.l(x).add_(x)", l=L),
    "add gelu": case("F.gelu(s.l(x) + x)", l=L),
    "mul silu": case("F.silu(s.l(x) * x)", l=L),
    "mul in place": case("s.l(x).mul_(2.0)", l=L),
    "sub": case("s.l(x) - x", l=L),
    "matmul": case("s.l(x) @ x.transpose(0, 1)", l=L),
    "matmul relu": case("F.relu(torch.matmul(s.l(x), x.transpose(0, 1)))", l=L),
    "einsum": case("torch.einsum('ij,kj->ik', s.l(x), x)", l=L),
    "mean": case("s.l(x).mean(1)", l=L),
    "mean keepdim": case("s.m(s.l(x).mean(0, keepdim=True))", l=L, m=L),
    "embedding": case("s.l(s.e(x))", "torch.tensor([[1, 2]])", e="nn.Embedding(10, 8)", l=L),
    "parameter": case("s.l(x) + s.p", l=L, p="nn.Parameter(torch.randn(8))"),
    "parameter with a spec": case(
        "s.l(x) + s.p", config=everywhere(op_state_spec={"*": {}}), l=L, p="nn.Parameter(torch.randn(8))"
    ),
    "constant": case("s.l(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])", l=L),
    "module called twice": case("s.l(s.l(x))", l=L),
    "three readers": case("s.l(x) + s.m(x) + x", l=L, m=L),
    "reader without a spec": case("(s.l(x), x.abs())", l=L),
    "producer without a spec": case("(lambda y: (s.l(y), y))(x.abs())", l=L),
    "convolutions": case(
        "s.e(s.d(F.relu(s.b(s.c(x))))) + x",
        IMAGE,
        **{**BLOCK, "e": "nn.Conv2d(4, 4, 1)"},
    ),
    "residual block": case("F.relu(s.e(s.d(F.relu(s.b(s.c(x)), inplace=True))) + x)", IMAGE, **BLOCK),
    "pools and flatten": case(
        "s.m(torch.flatten(F.adaptive_avg_pool2d(F.max_pool2d(F.relu(s.c(x)), 2), 1), 1))",
        IMAGE,
        c=BLOCK["c"],
        m="nn.Linear(4, 3)",
    ),
    "avg pool": case("s.c(F.avg_pool2d(s.c(x), 2))", IMAGE, c=BLOCK["c"]),
    "pool per channel": case(
        "F.max_pool2d(s.c(x), 2)",
        IMAGE,
        everywhere(op_input_spec=PER_CHANNEL, op_output_spec=PER_CHANNEL),
        c=BLOCK["c"],
    ),
    "flatten per channel": case(
        "torch.flatten(s.c(x), 1)",
        IMAGE,
        everywhere(op_input_spec=PER_CHANNEL, op_output_spec=PER_CHANNEL),
        c=BLOCK["c"],
    ),
    "conv1d bn": case("F.relu(s.b(s.c(x)))", "torch.randn(2, 4, 8)", c="nn.Conv1d(4, 4, 3)", b="nn.BatchNorm1d(4)"),
    "conv transpose bn": case("F.relu(s.b(s.c(x)))", IMAGE, c="nn.ConvTranspose2d(4, 6, 3)", b="nn.BatchNorm2d(6)"),
    "producer off": case("(lambda y: (s.m(y), y.abs()))(s.l(x))", config=named(l={"op_output_spec": None}), l=L, m=L),
    "producer silent": case("(lambda y: (s.m(y), y.abs()))(s.l(x))", config=named(l={"op_output_spec": {}}), l=L, m=L),
    "reader off": case("(lambda y: (s.m(y), y.abs()))(s.l(x))", config=named(m={"op_input_spec": None}), l=L, m=L),
    "reader silent": case("s.m(s.l(x))", config=named(m={"op_input_spec": {}}), l=L, m=L),
    "both off": case("s.m(s.l(x))", config=named(m={"op_input_spec": None}, l={"op_output_spec": None}), l=L, m=L),
    "producer stronger": case("s.m(s.l(x))", config=named(l={"op_output_spec": A4}), l=L, m=L),
    "reader stronger": case("s.m(s.l(x))", config=named(m={"op_input_spec": A4}), l=L, m=L),
    "later entry stronger": case(
        "s.m(s.l(x))",
        config=named(m={"op_input_spec": {"*": {"dtype": "int2"}}}, l={"op_output_spec": A4}),
        l=L,
        m=L,
    ),
    "readers differ": case("(s.l(x), s.m(x))", config=named(m={"op_input_spec": A4}), l=L, m=L),
    "one reader off": case("(s.l(x), s.m(x))", config=named(m={"op_input_spec": None}), l=L, m=L),
    "inputs only": case("s.m(s.l(x))", config=everywhere(op_output_spec=None), l=L, m=L),
    "outputs only": case("s.m(s.l(x))", config=everywhere(op_input_spec=None), l=L, m=L),
    "outputs only, inputs silent": case("s.m(s.l(x))", config=everywhere(op_input_spec={}), l=L, m=L),
    "mean of what nobody speaks of": case("s.l(x.mean(0, True))", config=everywhere(op_input_spec={}), l=L),
    "mean of an input that is off": case("s.l(x.mean(0, True))", config=everywhere(op_input_spec=None), l=L),
    "mean of a moved input": case("s.l(x.t().mean(0, True).repeat(1, 4))", config=everywhere(op_input_spec={}), l=L),
    "mean of a simulated input": case("s.m(s.l(x).mean(0, True))", config=everywhere(op_input_spec={}), l=L, m=L),
    "mean of a producer that is off": case(
        "s.m(s.l(x).mean(0, True))",
        config={"global_config": {"op_input_spec": {}}, "module_name_configs": {"l": {"op_output_spec": None}}},
        l=L,
        m=L,
    ),
    "pools in a row that nobody speaks of": case(
        "s.c(F.avg_pool2d(F.max_pool2d(x, 2), 2))",
        IMAGE,
        config=everywhere(op_input_spec={}),
        c="nn.Conv2d(4, 4, 1)",
    ),
    "concatenation, inputs silent": case(
        "s.m(torch.cat([x, x.abs()], 1))", config=everywhere(op_input_spec={}), m="nn.Linear(16, 3)"
    ),
    "concatenation, one input simulated": case(
        "s.m(torch.cat([s.l(x), x], 1))", config=everywhere(op_input_spec={}), l=L, m="nn.Linear(16, 3)"
    ),
    "concatenation, one input named": case(
        "s.m(torch.cat([x, x.abs()], 1))",
        config=everywhere(op_input_spec={}, op_type_config={"cat": {"op_input_spec": {1: {"dtype": "int4"}}}}),
        m="nn.Linear(16, 3)",
    ),
    "op type off": case("F.relu(s.l(x)) + x", config=everywhere(op_type_config={"linear": None}), l=L),
    "fused op type has no say": case("F.relu(s.l(x))", config=everywhere(op_type_config={"relu": None}), l=L),
    "op name": case("s.m(s.l(x))", config=everywhere(op_name_config={"linear_1": None}), l=L, m=L),
    "module boundary": case(
        "s.m(s.l(x))", config=named(m={"module_input_spec": A4, "module_output_spec": A4}), l=L, m=L
    ),
    "module boundary around a container": case(
        "s.m(s.l(x))", config=named(m={"module_input_spec": A4}), l=L, m="nn.Sequential(nn.Linear(8, 8), nn.ReLU())"
    ),
    "module state": case("s.m(s.l(x))", config=named(m={"module_state_spec": {"weight": {"dtype": "int4"}}}), l=L, m=L),
    "weight only": case("s.m(F.relu(s.l(x)))", config=everywhere(op_input_spec=None, op_output_spec=None), l=L, m=L),
    "weight blocks that do not fit": case(
        "s.m(F.relu(s.l(x)))",
        "torch.randn(2, 6)",
        everywhere(op_state_spec={"weight": BLOCKS_OF_3["*"]}),
        l="nn.Linear(6, 8)",
        m=L,
    ),
    "folded weight blocks that do not fit": case(
        "s.d(F.relu(s.b(s.c(x))))", IMAGE, everywhere(op_state_spec={"weight": BLOCKS_OF_3["*"]}), **BLOCK
    ),
    "activation blocks that do not fit": case(
        "(lambda y: (s.m(y), F.relu(s.m(y)) + y))(s.l(x))",
        "torch.randn(2, 6)",
        everywhere(op_input_spec=BLOCKS_OF_3, op_output_spec=BLOCKS_OF_3),
        l="nn.Linear(6, 8)",
        m=L,
    ),
    "fp8": case(
        "s.m(F.relu(s.l(x)))",
        config=everywhere(
            op_input_spec={"*": {"dtype": "float8_e4m3fn"}}, op_output_spec={"*": {"dtype": "float8_e4m3fn"}}
        ),
        l=L,
        m=L,
    ),
}


def placements(package: str, payload: Any) -> Any:
    """Prepare a model and return its simulators in the order of their names."""
    import importlib
    import warnings

    import torch
    from torch import nn
    from torch.nn import functional as F

    quantization = importlib.import_module(f"{package}.quantization")
    simulators = importlib.import_module(f"{package}.quantization.spec.fake_quantize")
    scope = {"torch": torch, "nn": nn, "F": F}
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, source in payload["modules"].items():
                setattr(self, name, eval(source, scope))

        def forward(self, x: torch.Tensor) -> Any:
            return eval(payload["forward"], {**scope, "s": self, "x": x})

    model = Model().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            module.weight.data.uniform_(0.5, 2.0)
            module.bias.data.normal_()
    x = eval(payload["inputs"], scope)
    data = {"quantization_config": payload["config"] or {"global_config": {}}}
    quantizer = quantization.Quantizer(model, quantization.QuantizerConfig.from_dict(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = quantizer.prepare((x,))
    modules = dict(prepared.named_modules(remove_duplicate=False))

    def kind(node: Any) -> str:
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            return str(getattr(node.target, "__name__", "") if schema is None else schema.name)
        module = modules.get(str(node.target))
        if isinstance(module, simulators.FakeQuantizeImplBase):
            return "simulator"
        if node.op != "call_module":
            return str(node.op)
        role = str(node.target).rpartition(".")[2].rstrip("0123456789").rstrip("_")
        return "aten::batch_norm" if role == "output" else f"aten::{role}"

    def readers(node: Any) -> list[str]:
        # What takes a batch norm's scale out of a weight again stands between the simulator and the layer.
        found = [(user, kind(user)) for user in node.users]
        return sorted(one for user, of in found for one in (readers(user) if of == "aten::unfold" else [of]))

    rows: list[Any] = []
    groups: dict[int, int] = {}
    calls = [n for n in prepared.graph.nodes if n.op == "call_module" and kind(n) == "simulator"]
    for node in sorted(calls, key=lambda n: int(n.target.rpartition("_")[2])):
        simulator = modules[node.target]
        calculator = simulator.qparams_calculator
        weight = simulator.quantization_target.value == "weight"
        scale = calculator.scale
        rows.append(
            {
                "name": node.target,
                "of": node.args[0].name,
                "group": groups.setdefault(id(simulator), len(groups)),
                "reads": "weight" if weight else kind(node.args[0]),
                "read by": readers(node),
                "dtype": str(calculator.dtype),
                "scheme": simulator.qscheme.value,
                "bounds": list(calculator.float_range),
                "granularity": simulator.granularity.model_dump(),
                "scale": scale.flatten().tolist(),
            }
        )
    return {"rows": rows, "output": [y.detach() for y in torch.utils._pytree.tree_leaves(prepared(x))]}


@requires_peer
@pytest.mark.parametrize("name", SAME)
def test_simulators_stand_where_the_peer_has_them(name: str) -> None:
    """Names, sharing, producers, consumers, specs, scales and the prepared model's output are the peer's."""
    ours, theirs = both(placements, SAME[name])
    assert [_rough(row) for row in ours["rows"]] == [_rough(row) for row in theirs["rows"]]
    for mine, other in zip(ours["rows"], theirs["rows"], strict=True):
        assert mine["scale"] == pytest.approx(other["scale"], rel=1e-5)
    for mine, other in zip(ours["output"], theirs["output"], strict=True):
        assert (mine - other).abs().max() <= 1e-3 + _one_step(ours)


def _rough(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("scale", "of")}


def _one_step(result: dict[str, Any]) -> float:
    """Rounding of folded weights may differ in the last place, and then an activation by one step."""
    return max((max(row["scale"]) for row in result["rows"] if row["reads"] != "weight"), default=0.0)
