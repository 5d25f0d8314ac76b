"""The spec of pruning: what is removed from one weight."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from bitwright.common import CompressionType
from bitwright.config.spec import CompressionSpec
from bitwright.quantization.spec._fields import RegisteredClass

from .prune import PruneImplBase
from .scheme import PruningScheme, Unstructured

__all__ = ["PruningSpec", "default_weight_pruning_spec"]


class PruningSpec(CompressionSpec):
    """How one weight is pruned.

    Attributes:
        target_sparsity: share of the units to remove in the end, in [0, 1]. An N:M pattern fixes its own.
        pruning_scheme: which entries go together; a scheme or a mapping such as
            ``{"type": "channel_structured", "axis": 0}``.
        pruning_algo: what makes an entry important: ``"default"`` (magnitude), ``"wanda"``, ``"sparsegpt"``, or a
            registered class or its key. The latter two want ``MagnitudePruner.calibration_mode``.
        scope: what is ranked against what: ``"tensor"``, ``"row"`` (each output channel on its own), or ``"global"``
            (all weights of the model with this scope and the same scheme, algorithm and target). None is the
            algorithm's own: the tensor for magnitudes, rows for Wanda.

    Raises:
        pydantic.ValidationError: an unknown field (the message proposes the nearest), or a bad value.

    Example:
        >>> PruningSpec(target_sparsity=0.9, pruning_scheme={"type": "channel_structured"}).pruning_scheme
        ChannelStructured(axis=0)
    """

    target_sparsity: float = Field(default=0.5, ge=0.0, le=1.0)
    pruning_scheme: Annotated[PruningScheme, BeforeValidator(PruningScheme.maybe_build_from_dict)] = Field(
        default_factory=Unstructured
    )
    pruning_algo: Annotated[Any, RegisteredClass(PruneImplBase)] = Field(default="default", validate_default=True)
    scope: Literal["tensor", "row", "global"] | None = None

    _compression_type: CompressionType = PrivateAttr(default=CompressionType.PRUNING)

    @property
    def final_sparsity(self) -> float:
        """Share of the entries that is removed in the end."""
        return self.pruning_scheme.final_sparsity(self.target_sparsity)

    def describe(self) -> str:
        """Return the spec in a few words, for tables."""
        algo = PruneImplBase.get_key(self.pruning_algo)
        words = [f"{self.final_sparsity:.0%} sparse", self.pruning_scheme.describe()]
        words += [algo] if algo != "default" else []
        words += [self.scope] if self.scope is not None else []
        return " ".join(words)


def default_weight_pruning_spec() -> PruningSpec:
    """Return 50 % of the entries by magnitude, each on its own."""
    return PruningSpec()
