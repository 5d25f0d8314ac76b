"""Random models and configurations in graph mode: simulators stand and mean the same as in coreai-opt."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from _peer import PeerError, both, requires_peer
from test_graph_placements import placements

SEEDS = range(int(os.environ.get("BITWRIGHT_PEER_CASES", "1500")) // 40)

_UNARY = ("{l}", "F.relu({l})", "torch.sigmoid({l})", "F.gelu({l})", "torch.tanh({l})", "F.silu({l})", "F.relu6({l})")
_BINARY = ("{a} + {b}", "{a} * {b}", "{a} - {b}", "F.relu({a} + {b})", "F.gelu({a} * {b})")
_MOVES = (
    "{a}.transpose(0, 1).transpose(0, 1)",
    "{a}.permute(0, 1)",
    "F.dropout({a}, 0.5, False)",
    "{a}.clone()",
    "{a}.view(4, 4).view(2, 8)",
    "{a}.unsqueeze(0).squeeze(0)",
    "{a}[:, :4].reshape(1, 8).expand(2, 8)",
)
_SPECS: tuple[Any, ...] = (
    None,
    {},
    {"*": {}},
    {"*": {"dtype": "int4"}},
    {"*": {"qscheme": "asymmetric"}},
    {"*": {"dtype": "uint8", "qscheme": "asymmetric"}},
    {"*": {"dtype": "float8_e4m3fn"}},
)
_STATES: tuple[Any, ...] = (
    None,
    {},
    {"weight": {"dtype": "int4"}},
    *({"weight": {"granularity": {"type": "per_block", "axis": 1, "block_size": size}}} for size in (3, 8, 16)),
)  # weights of 8 and 16 inputs, of which blocks of 3 fit none


def random_model(rng: random.Random) -> dict[str, Any]:
    """A model as ``placements`` takes it: assignments in a row, every layer used once."""
    values, lines, modules = ["x"], [], {}
    for step in range(rng.randint(2, 6)):
        a, b = rng.choice(values), rng.choice(values)
        kind = rng.random()
        if kind < 0.5:
            modules[f"l{step}"] = "nn.Linear(8, 8)"
            expression = rng.choice(_UNARY).format(l=f"s.l{step}({a})")
        elif kind < 0.7:
            expression = rng.choice(_BINARY).format(a=a, b=b)
        elif kind < 0.8:
            modules[f"l{step}"] = "nn.Linear(16, 8)"
            expression = f"s.l{step}(torch.cat([{a}, {b}], 1))"
        else:
            expression = rng.choice(_MOVES).format(a=a)
        lines.append(f"y{step} := {expression}")
        values.append(f"y{step}")
    if not modules:
        modules["l"] = "nn.Linear(8, 8)"
        lines.append(f"last := s.l({values[-1]})")
    used = " ".join(line.split(":=")[1] for line in lines)
    results = [line.split()[0] for line in lines if line.split()[0] not in used]
    forward = f"[{', '.join(f'({line})' for line in lines)}] and ({', '.join(results)},)"
    return {
        "forward": forward,
        "modules": modules,
        "inputs": "torch.randn(2, 8)",
        "config": random_config(rng, modules),
    }


def random_config(rng: random.Random, modules: dict[str, str]) -> dict[str, Any]:
    """Specs for inputs and outputs, globally and for some layers."""
    config: dict[str, Any] = {"global_config": random_part(rng)}
    chosen = [name for name in modules if rng.random() < 0.4]
    rng.shuffle(chosen)
    if chosen:
        config["module_name_configs"] = {name: random_part(rng) for name in chosen}
    return config


def random_part(rng: random.Random) -> dict[str, Any]:
    """Some of the op-level fields of a module config."""
    part = {name: rng.choice(_SPECS) for name in ("op_input_spec", "op_output_spec") if rng.random() < 0.5}
    return part | ({"op_state_spec": rng.choice(_STATES)} if rng.random() < 0.5 else {})


@requires_peer
@pytest.mark.parametrize("seed", SEEDS)
def test_random_model(seed: int) -> None:
    """Names, sharing, producers, readers, dtypes, schemes, bounds and scales are the peer's."""
    model = random_model(random.Random(seed))
    try:
        ours, theirs = both(placements, model)
    except PeerError as error:  # ours has worked; an FP8 layer that shares with a ReLU is an error there
        if "requires symmetric quantization scheme" not in str(error):
            raise
        return
    if _differ_by_scheme(ours["rows"]):
        return
    assert [_rough(row) for row in ours["rows"]] == [_rough(row) for row in theirs["rows"]], model
    for mine, other in zip(ours["rows"], theirs["rows"], strict=True):
        assert mine["scale"] == pytest.approx(other["scale"], rel=1e-5)


def _rough(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("scale", "of")}


def _differ_by_scheme(rows: list[dict[str, Any]]) -> bool:
    """Two readers of an input want different schemes or bounds: the peer gives both what the first one wants."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        found.setdefault((row["of"], row["dtype"]), set()).add(str((row["scheme"], row["bounds"])))
    return any(len(kinds) > 1 for kinds in found.values())
