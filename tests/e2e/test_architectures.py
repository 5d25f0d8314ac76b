"""Real architectures through both modes: weights, weights and activations, and training, each to the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from bitwright._utils import direct_calls
from bitwright.quantization import Quantizer, QuantizerConfig

from .architectures import NAMES, Architecture, build

pytest.importorskip("transformers")

QUICK = ("resnet", "vit", "llama", "unet")
MODES = ("graph", "eager")
# Numbers along which graph mode knows a formula's range (the tanh of a pooler) are far below it without training.
LEAST_DECIBEL = {"w8": 30, "w8a8": 12}
# SigLIP returns cosines of two towers' embeddings; without training these are nearly orthogonal, so the sums cancel.
LEAST_DECIBEL_OF = {("siglip", "w8"): 25}


def outputs(architecture: Architecture, model: Any) -> list[torch.Tensor]:
    """Return the floating-point results of a model, in order."""
    result = model(*architecture.args, **architecture.kwargs)
    entries = list(result.values()) if isinstance(result, dict) else [result]
    return [leaf for leaf in tree_leaves(entries) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def run(name: str, kind: str, mode: str) -> None:
    """Prepare, calibrate or train, finalize; compare the prepared with the finalized model and with the float one."""
    architecture = build(name)
    with torch.no_grad():
        expected = outputs(architecture, architecture.model)[0]
    preset = QuantizerConfig.presets.w8(execution_mode=mode)
    config = preset if kind == "w8" else QuantizerConfig(execution_mode=mode)
    quantizer = Quantizer(architecture.model, config)
    prepared: Any = quantizer.prepare(architecture.args, example_kwargs=architecture.kwargs)
    if kind == "w8a8":
        with quantizer.calibration_mode(), torch.no_grad():
            for _ in range(2):
                outputs(architecture, prepared)
    if kind == "qat":
        optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4)
        with quantizer.training_mode():
            for _ in range(3):
                optimizer.zero_grad()
                outputs(architecture, prepared)[0].float().square().mean().backward()
                optimizer.step()
    prepared.eval()
    finalized = quantizer.finalize(backend="_torch")
    with torch.no_grad():
        before, after = outputs(architecture, prepared), outputs(architecture, finalized)
    assert len(before) == len(after)
    for mine, final in zip(before, after, strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, final)
    if kind != "qat":
        noise = (expected.double() - after[0].double()).square().sum()
        decibel = 10 * torch.log10(expected.double().square().sum() / noise)
        assert decibel > LEAST_DECIBEL_OF.get((name, kind), LEAST_DECIBEL[kind])


def weights(name: str, mode: str, kind: str) -> dict[str, Any]:
    """The spec of every weight of the plan."""
    architecture = build(name)
    preset = QuantizerConfig.presets.w8(execution_mode=mode)
    config = preset if kind == "w8" else QuantizerConfig(execution_mode=mode)
    plan = Quantizer(architecture.model, config).plan(architecture.args, example_kwargs=architecture.kwargs)
    assert not plan.problems
    return {row.tensor: row.spec for row in plan if row.kind == "weight"}


@pytest.mark.parametrize("kind", ["w8a8", "qat"])
@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, kind: str) -> None:
    """Output finite, finalized equals prepared bit for bit, and close to the float model."""
    run(name, kind, "graph")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["w8", "w8a8", "qat"])
@pytest.mark.parametrize("name", NAMES)
def test_matrix(name: str, kind: str, mode: str) -> None:
    """The same for every architecture, way and mode."""
    run(name, kind, mode)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in QUICK)])
@pytest.mark.parametrize("kind", ["w8", "w8a8"])
def test_plans_of_both_modes_agree_on_every_weight(name: str, kind: str) -> None:
    """Which weights, with which axis; and neither mode has anything to complain about."""
    eager, graph = (weights(name, mode, kind) for mode in ("eager", "graph"))
    assert eager == graph
    assert any(spec is not None for spec in graph.values())


def trained(name: str, mode: str, plainly: bool) -> list[torch.Tensor | None]:
    """Outputs, gradients and state after two backward passes; ``plainly``: every simulator is called as a module."""
    torch.manual_seed(0)
    architecture = build(name)
    quantizer = Quantizer(architecture.model, QuantizerConfig(execution_mode=mode))
    prepared: Any = quantizer.prepare(architecture.args, example_kwargs=architecture.kwargs)
    with quantizer.calibration_mode(), torch.no_grad():
        outputs(architecture, prepared)
    for module in prepared.modules():
        if plainly and isinstance(module, direct_calls.DirectlyCalled):
            module.register_forward_hook(lambda *call: None)
    with quantizer.training_mode():
        for seed in (1, 2):
            torch.manual_seed(seed)
            found = outputs(architecture, prepared)
            torch.stack([y.float().square().mean() for y in found]).sum().backward()
    gradients = [parameter.grad for parameter in prepared.parameters()]
    return [*(y.detach() for y in found), *gradients, *prepared.state_dict().values()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in QUICK)])
def test_overwritten_tensors_are_needed_by_nobody(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with direct calls is plain training, however small the tensors are that they overwrite or take."""
    monkeypatch.setattr(direct_calls, "_WORTH_ASKING", 1)
    for place in ("cpu.memory.LARGE", "cpu.ready.SMALL", "cpu.fused.SMALL", "many.SMALL"):
        monkeypatch.setattr(f"bitwright.kernels.{place}", 1)
    monkeypatch.setattr("bitwright.kernels.many.LARGEST_OF_MANY", 0)
    for direct, plain in zip(*(trained(name, mode, plainly) for plainly in (False, True)), strict=True):
        assert (direct is None) == (plain is None)
        assert direct is None or torch.equal(direct, plain)
