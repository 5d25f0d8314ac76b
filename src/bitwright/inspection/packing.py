"""The packed artifact of a model of either mode."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitwright.artifact import Artifact

__all__ = ["artifact_of"]


def artifact_of(model: nn.Module, *, config: Any = None, plan: Any = None) -> Artifact:
    """Pack the weights of a prepared model, eager or graph: :meth:`bitwright.artifact.Artifact.from_model`.

    Args:
        model: a model that a compressor prepared. It is not changed.
        config: the configuration, kept for the record.
        plan: the plan, likewise.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
            not calibrated.
    """
    return Artifact.from_model(model, config=config, plan=plan)
