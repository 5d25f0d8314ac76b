"""Configs mean the same here and in coreai-opt, over random configs, models and changes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bitwright.quantization.config import QuantizerConfig

sys.path.insert(0, str(Path(__file__).parent))
import config_worker

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PEER = os.environ.get("BITWRIGHT_PEER_PYTHON", "")
CASES = int(os.environ.get("BITWRIGHT_PEER_CASES", "400"))

LEAVES = (["ReLU", []], ["Tanh", []], ["Linear", [2, 3]], ["Conv2d", [2, 2, 1]])
CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
NAMES = ("0", "1", "2", "up", "down", "attn")
NAME_KEYS = (
    "",
    "0",
    "up",
    "0.0",
    r"0\..*",
    r".*\.up",
    "up|down",
    r".*",
    r".*\.\d",
    r"(0|1)\.(up|0)",
    "attn.*",
    r".*attn\.down",
    "nothing",
)
TYPE_KEYS = tuple(
    f"torch.nn.modules.{path}"
    for path in (
        "activation.ReLU",
        "activation.Tanh",
        "linear.Linear",
        "conv.Conv2d",
        "container.Sequential",
        "container.ModuleList",
        "container.ModuleDict",
        "sparse.Embedding",
    )
)


def random_tree(rng: random.Random) -> dict[str, Any]:
    """A module tree with up to three levels below the root, in which modules may be shared."""
    ids: list[int] = []

    def node(depth: int) -> dict[str, Any]:
        if ids and rng.random() < 0.12:
            return {"ref": rng.choice(ids)}
        leaf = depth == 0 or rng.random() < 0.35
        kind, arguments = rng.choice(LEAVES) if leaf else (rng.choice(CONTAINERS), [])
        tree: dict[str, Any] = {"type": kind, "arguments": arguments, "id": len(ids) + 1000 * depth}
        if not leaf:
            tree["children"] = [[name, node(depth - 1)] for name in rng.sample(NAMES, rng.randint(0, 3))]
        ids.append(tree["id"])
        return tree

    children = [[name, node(3)] for name in rng.sample(NAMES, rng.randint(1, 4))]
    return {"type": "Sequential", "id": -1, "children": children}


def random_spec(rng: random.Random) -> Any:
    """A spec in its written form, or None."""
    if rng.random() < 0.25:
        return None
    spec: dict[str, Any] = {"dtype": rng.choice(("int8", "int4", "uint8", "uint2", "float8_e4m3fn", "float8_e5m2"))}
    granularities = (
        {"type": "per_tensor"},
        {"type": "per_channel", "axis": rng.choice((0, 1, -1, None))},
        {"type": "per_block", "axis": 1, "block_size": 16},
        {"type": "per_block", "block_size": [1, 8]},
    )
    if rng.random() < 0.7:
        spec["granularity"] = rng.choice(granularities)
    if rng.random() < 0.4 and not spec["dtype"].startswith("float"):
        spec["qscheme"] = rng.choice(("symmetric", "asymmetric", "symmetric_with_clipping"))
        spec["qformulation"] = rng.choice(("zp", "minval"))
    if rng.random() < 0.3:
        spec["qparam_calculator_cls"] = rng.choice(("static", "moving_average", "global_minmax", "default"))
    if rng.random() < 0.2:
        spec["float_range"] = rng.choice(([-1, 1], [None, 2.5], [0, 6]))
    return spec


def random_spec_dict(rng: random.Random, keys: tuple[Any, ...], bad: float) -> Any:
    """A spec dictionary, or None; with probability ``bad`` one that is refused or odd."""
    draw = rng.random()
    if draw < bad:
        return rng.choice(([1], 5, {"0": None, 0: None}, {"x": {"dtype": "int99"}}, {"x": 3}))
    if draw < 0.25:
        return None
    return {key: random_spec(rng) for key in rng.sample(keys, rng.randint(0, 3))}


ACTIVATION_KEYS = ("0", "1", "00", "*", "x", "-1", "²")
STATE_KEYS = ("weight", "bias", "*", "0")


def random_op_config(rng: random.Random, bad: float = 0.0) -> dict[str, Any]:
    """Fields of an op config; each may be omitted."""
    keys = {"op_input_spec": ACTIVATION_KEYS, "op_output_spec": ACTIVATION_KEYS, "op_state_spec": STATE_KEYS}
    fields = {field: random_spec_dict(rng, names, bad) for field, names in keys.items() if rng.random() < 0.6}
    if rng.random() < bad:
        fields["op_wrong"] = None
    return fields


def random_module_config(rng: random.Random, module_specs: bool = True, bad: float = 0.0) -> dict[str, Any]:
    """Fields of a module config; each may be omitted."""
    fields = random_op_config(rng, bad)
    for field, names in (("op_type_config", ("linear", "add", "conv2d")), ("op_name_config", ("add.*", "linear_1"))):
        if rng.random() < 0.3:
            chosen = rng.sample(names, rng.randint(0, 2))
            fields[field] = rng.choice(
                (None, {name: rng.choice((None, random_op_config(rng, bad))) for name in chosen})
            )
    if module_specs:
        for field, keys in (
            ("module_input_spec", ACTIVATION_KEYS),
            ("module_output_spec", ACTIVATION_KEYS),
            ("module_state_spec", STATE_KEYS),
        ):
            if rng.random() < 0.3:
                fields[field] = random_spec_dict(rng, keys, bad)
    if rng.random() < 0.15:
        fields["qat_schedule"] = {
            "enable_observer": rng.randint(0, 2),
            "enable_fake_quant": rng.randint(0 if bad else 2, 4),
        }
    return fields


def random_config(rng: random.Random, bad: float = 0.0) -> dict[str, Any]:
    """Fields of a whole config."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.6:
        fields["global_config"] = rng.choice((None, random_module_config(rng, rng.random() < bad, bad)))
    for field, keys in (("module_name_configs", NAME_KEYS), ("module_type_configs", TYPE_KEYS)):
        if rng.random() < 0.85:
            chosen = rng.sample(keys, rng.randint(0, 4))
            fields[field] = {key: None if rng.random() < 0.3 else random_module_config(rng, bad=bad) for key in chosen}
    if rng.random() < bad:
        fields.update(rng.choice(({"module_type_configs": {"Linear": None}}, {"execution_mode": "no"}, {"wrong": 1})))
    if rng.random() < 0.2:
        fields["execution_mode"] = rng.choice(("graph", "eager", "pt2e"))
    return fields


def resolve_case(rng: random.Random) -> dict[str, Any]:
    """Which config each module of a random model gets."""
    return {"operation": "resolve", "model": random_tree(rng), "config": random_config(rng)}


def construct_case(rng: random.Random) -> dict[str, Any]:
    """What omitted, None and empty fields become, and what is refused."""
    make: dict[str, Callable[..., dict[str, Any]]] = {
        "OpQuantizerConfig": random_op_config,
        "ModuleQuantizerConfig": random_module_config,
        "QuantizerConfig": random_config,
    }
    name = rng.choice(list(make))
    return {"operation": "construct", "class": name, "fields": make[name](rng, bad=rng.choice((0.0, 0.05)))}


def load_case(rng: random.Random) -> dict[str, Any]:
    """A file that Bitwright wrote, read by both."""
    while True:
        try:
            return {"operation": "load", "text": QuantizerConfig(**random_config(rng)).to_yaml()}
        except ValidationError:  # two spellings of one position
            continue


def mutate_case(rng: random.Random) -> dict[str, Any]:
    """A chain of changes, in which those fail that coreai-opt too undoes."""

    def target() -> Any:
        return rng.choice(
            (["class", "Linear"], ["class", "ReLU"], ["text", "head"], ["text", r"layers\..*"], ["text", "a"])
        )

    def targets() -> list[Any]:
        chosen = [target() for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.15:
            chosen.append(rng.choice((["number", 42], ["class", "int"])))
        return chosen

    def module() -> Any:
        return rng.choice(
            (["none", None], ["preset", "w8"], ["preset", "w4_per_block"], ["module", random_module_config(rng)])
        )

    def change() -> Any:
        method = rng.choice(
            ("set_global", "set_module_type", "set_module_name", "only_for", "without", "set_execution_mode")
        )
        if method == "set_global":
            return [
                method,
                [rng.choice((["none", None], ["preset", "w4"], ["module", random_module_config(rng, False)]))],
            ]
        if method == "set_module_type":
            key = rng.choice(
                (["class", "Linear"], ["text", "a.B"], ["text", "Linear"], ["class", "int"], ["number", 3])
            )
            return [method, [key, module()]]
        if method == "set_module_name":
            return [method, [["text", rng.choice(("head", "a", r"layers\..*"))], module()]]
        if method == "set_execution_mode":
            return [method, [["text", rng.choice(("graph", "eager", "PT2E", "no", "EAGER"))]]]
        return [method, targets()]

    return {
        "operation": "mutate",
        "config": random_config(rng),
        "changes": [change() for _ in range(rng.randint(1, 6))],
    }


def look_up_case(rng: random.Random) -> dict[str, Any]:
    """A look-up by several keys."""
    names = ["weight", "bias", 0, 1, "x"]
    specs = [[key, rng.choice((None, 1, 2, 3))] for key in rng.sample([*names, "*"], rng.randint(0, 5))]
    return {"operation": "look_up", "keys": rng.sample(names, rng.randint(0, 3)), "specs": specs}


def preset_case(rng: random.Random) -> dict[str, Any]:
    """A preset that both have."""
    name = rng.choice(("w8", "w4", "w4_per_block"))
    arguments: dict[str, Any] = {} if rng.random() < 0.4 else {"axis": rng.choice((None, 0, 1, -1))}
    if name == "w4_per_block" and rng.random() < 0.5:
        arguments["block_size"] = rng.choice((8, 64))
    owner = rng.choice(("QuantizerConfig", "ModuleQuantizerConfig"))
    if rng.random() < 0.3:
        arguments["execution_mode"] = "eager"
    return {"operation": "preset", "class": owner, "name": name, "arguments": arguments}


def run_both(
    tmp_path: Path, make: Callable[[random.Random], dict[str, Any]], count: int, seed: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return ``count`` cases, what Bitwright makes of them, and what coreai-opt does."""
    if not PEER:
        pytest.skip("BITWRIGHT_PEER_PYTHON does not name an interpreter with coreai-opt")
    rng = random.Random(seed)
    cases = json.loads(json.dumps([make(rng) for _ in range(count)]))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [PEER, config_worker.__file__, str(tmp_path / "cases.json"), str(tmp_path / "results.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    theirs = json.loads((tmp_path / "results.json").read_text())
    ours = json.loads(json.dumps(config_worker.run_cases("bitwright", cases)))
    for result in (*ours, *theirs):
        if isinstance(result, dict):
            result.pop("message", None)
    return cases, ours, theirs


def first_difference(mine: Any, peers: Any, path: str = "") -> str:
    """Where two results differ first, for a message that can be read."""
    if isinstance(mine, dict) and isinstance(peers, dict) and mine.keys() == peers.keys():
        pairs = [(key, mine[key], peers[key]) for key in mine]
    elif isinstance(mine, list) and isinstance(peers, list) and len(mine) == len(peers):
        pairs = [(str(at), one, other) for at, (one, other) in enumerate(zip(mine, peers, strict=True))]
    else:
        return "" if mine == peers else f"{path}: {str(mine)[:200]} here, {str(peers)[:200]} there"
    return next(filter(None, (first_difference(one, other, f"{path}/{key}") for key, one, other in pairs)), "")


def without_module_specs_of_shared(case: dict[str, Any], result: Any) -> Any:
    """Drop the module-level specs of modules with several names: a difference on purpose, see docs/differences.md."""
    if "error" in result:
        return result
    names: dict[int, int] = {}
    model = config_worker.build_model(case["model"], {})
    for _, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = names.get(id(module), 0) + 1
    shared = {name for name, module in model.named_modules() if names[id(module)] > 1}

    def trimmed(name: str, fields: list[Any]) -> list[Any]:
        return [field for field in fields if name not in shared or not field[0].startswith("str:module_")]

    return {level: [[name, trimmed(name, fields)] for name, fields in found] for level, found in result.items()}


def without_own_fields(result: Any) -> Any:
    """Drop the fields that QATSchedule has beyond the peer's, where they are unset."""
    if not isinstance(result, list):
        return {key: without_own_fields(value) for key, value in result.items()} if isinstance(result, dict) else result
    own = (["str:freeze_batch_norm", None], ["str:least_bits", None])
    return [without_own_fields(entry) for entry in result if entry not in own]


@pytest.mark.parametrize(
    "make",
    [resolve_case, construct_case, load_case, mutate_case, look_up_case, preset_case],
    ids=lambda make: make.__name__,
)
def test_equal(make: Callable[[random.Random], dict[str, Any]], tmp_path: Path) -> None:
    """Same fields, same keys in the same order, same type of error."""
    cases, ours, theirs = run_both(tmp_path, make, CASES, seed=5)
    ours = [without_own_fields(mine) for mine in ours]
    if make is resolve_case:
        ours = [without_module_specs_of_shared(case, mine) for case, mine in zip(cases, ours, strict=True)]
        theirs = [without_module_specs_of_shared(case, peers) for case, peers in zip(cases, theirs, strict=True)]
    found = [first_difference(mine, peers) for mine, peers in zip(ours, theirs, strict=True)]
    differing = [(case, where) for case, where in zip(cases, found, strict=True) if where]
    assert not differing, f"{len(differing)} of {CASES} differ; the first at {differing[0][1]} in {differing[0][0]}"


def test_the_cases_are_not_idle() -> None:
    """Random configs are accepted, refused, and own modules at every level, often enough to compare something."""
    rng = random.Random(7)
    built = config_worker.run_cases("bitwright", [construct_case(rng) for _ in range(200)])
    refused = [result for result in built if isinstance(result, dict)]
    assert 10 < len(refused) < 120
    resolved = config_worker.run_cases("bitwright", [resolve_case(rng) for _ in range(100)])
    accepted = [result for result in resolved if "error" not in result]
    assert len(accepted) > 60
    assert all(sum(bool(result[level]) for result in accepted) > 30 for level in accepted[0])
