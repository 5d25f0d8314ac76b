"""The error of this stage."""

from __future__ import annotations

from bitwright.errors import BitwrightError

__all__ = ["ArtifactError"]


class ArtifactError(BitwrightError, ValueError):
    """An artifact cannot be made, read or used: the message names the file, the tensor and the reason."""
