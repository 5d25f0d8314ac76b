"""``CompressionSpec`` under the module path that coreai-opt gives it."""

from .compression_spec import CompressionSpec

__all__ = ["CompressionSpec"]
