"""What was written for a target, run there or read back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bitwright.export.targets import Target

__all__ = ["Verified", "verify"]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a target made of the prepared model.

    Attributes:
        how: ``"run"`` or ``"read"``.
        outputs: the logits there, None if the target does not run here.
        weights_db: SQNR of the compressed weights, in dB, where there are no outputs.
        note: what was compared.
    """

    how: str
    outputs: torch.Tensor | None = None
    weights_db: float = math.inf
    note: str = ""


def verify(target: Target, path: Path, prepared: nn.Module, model: nn.Module, images: torch.Tensor) -> Verified:
    """Run a file in its target's runtime, or read it back and run or compare what it holds.

    Args:
        target: what it was written for.
        path: what was written.
        prepared: the prepared model that it came from.
        model: the float model, whose layers take the weights of checkpoints.
        images: input of the run.
    """
    if target.run is not None:
        return Verified("run", target.run(path, (images,))[0])
    if target.name == "coreml":
        return _core_ml(path, prepared)
    return Verified("read", _with_state(model, _state(target.name, path), images), note="read back into the network")


def _state(name: str, path: Path) -> Mapping[str, torch.Tensor]:
    if name == "artifact":
        from bitwright.artifact import Artifact

        artifact = Artifact.load(path)
        return {key: artifact.decode(key) for key in artifact}
    from bitwright.export.checkpoints import read_compressed_tensors, read_gguf

    return read_gguf(path) if name == "gguf" else read_compressed_tensors(path)


def _with_state(model: nn.Module, state: Mapping[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    twin = copy.deepcopy(model).eval()
    twin.load_state_dict(state)
    with torch.no_grad():
        logits: torch.Tensor = twin(images)
    return logits


def _core_ml(path: Path, prepared: nn.Module) -> Verified:
    """Compare the constants of a package, as coremltools decodes them, with the prepared model's weights."""
    from bitwright.export.coreml_package import compressed_constants
    from bitwright.inspection import artifact_of

    constants = [constant.float() for _, constant in compressed_constants(path)]
    artifact = artifact_of(prepared)
    noise = signal = 0.0
    for name in artifact.compressed:
        weight = artifact.decode(name).double()
        errors = [
            float((weight - constant.double().reshape(weight.shape)).square().sum())
            for constant in constants
            if constant.numel() == weight.numel()
        ]
        if not errors:
            raise ValueError(f"The package has no constant for {name!r} of shape {tuple(weight.shape)}.")
        noise += min(errors)
        signal += float(weight.square().sum())
    ratio = 10 * math.log10(signal / noise) if noise else math.inf
    count = len(artifact.compressed)
    return Verified(
        "read", weights_db=ratio, note=f"Core ML runs on Apple's systems only; {count} decoded weights compared"
    )
