"""Simulators of pruning: modules that set the unimportant entries of a weight to zero."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch

from bitwright._utils.spec_utils import PartialConstructor, with_args
from bitwright.common import CompressionType
from bitwright.config.spec import CompressionSimulatorBase

from .scheme import PruningScheme, Unstructured, keep_largest

if TYPE_CHECKING:
    from bitwright.pruning.config import SparsityScheduleBase

__all__ = ["PruneImplBase"]

Scope = Literal["tensor", "row", "global"]
InputStatistics = Literal["none", "norms", "gram"]

_RESIZED = {"mask": torch.bool, "input_scale": torch.float32}


class PruneImplBase(CompressionSimulatorBase, ABC):
    """Base class of pruning algorithms: implement ``compute_mask``, or ``scores``, and register the class.

    Args:
        target_sparsity: share of the units to remove in the end, in [0, 1].
        pruning_scheme: which entries are removed together.
        scope: what is ranked against what; None for the algorithm's own.
        row_axis: dimension of the output channels, for the scope ``"row"``.
        row_groups: into how many parts the other end of the layer is cut, where ``row_axis`` counts the output channels
            of one of them, as in a grouped transposed convolution.
        **kwargs: ignored; what else a spec or the eager engine hands over.

    Attributes:
        mask: bool buffer in the shape of the weight, True where an entry is kept; empty until first needed.
        input_scale: float32 buffer that broadcasts against the weight: how strongly each input of an output moves it,
            from calibration; None without one.
        step_count: int64 buffer, steps of the schedule so far.
        schedule: how sparsity grows with the steps; None for the target from the beginning.
        enabled: False lets the dense weight through.
        input_statistics: what the algorithm wants to know about a layer's inputs (set by subclasses).
        default_scope: the scope where the spec leaves it open (set by subclasses).
    """

    compression_type: ClassVar[CompressionType] = CompressionType.PRUNING
    input_statistics: ClassVar[InputStatistics] = "none"
    default_scope: ClassVar[Scope] = "tensor"

    mask: torch.Tensor
    input_scale: torch.Tensor | None
    step_count: torch.Tensor
    sparsity_state: torch.Tensor

    def __init__(
        self,
        target_sparsity: float = 0.5,
        pruning_scheme: PruningScheme | None = None,
        *,
        scope: Scope | None = None,
        row_axis: int = 0,
        row_groups: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.pruning_scheme = Unstructured() if pruning_scheme is None else pruning_scheme
        self.target_sparsity = self.pruning_scheme.final_sparsity(target_sparsity)
        self.scope: Scope = self.default_scope if scope is None else scope
        self.row_axis, self.row_groups = row_axis, row_groups
        self.schedule: SparsityScheduleBase | None = None
        self.enabled = True
        self._stale = True
        self._sparsity = self.target_sparsity
        self._steps = 0
        with torch.inference_mode(False):
            self.register_buffer("mask", torch.empty(0, dtype=torch.bool, device="cpu"))
            self.register_buffer("input_scale", None)
            self.register_buffer("step_count", torch.zeros((), dtype=torch.int64, device="cpu"))
            self.register_buffer("sparsity_state", torch.tensor(self._sparsity, dtype=torch.float64, device="cpu"))

    @staticmethod
    @abstractmethod
    def compute_mask(weight: torch.Tensor, sparsity: float, pruning_scheme: PruningScheme) -> torch.Tensor:
        """Return 1 for kept and 0 for removed entries, in the shape of ``weight``.

        Args:
            weight: the dense weight.
            sparsity: share of the units to remove, in [0, 1].
            pruning_scheme: which entries are removed together.
        """

    def scores(self, weight: torch.Tensor) -> torch.Tensor:
        """Return how important each entry is, not negative, comparable between weights; here its magnitude."""
        return weight.detach().abs()

    @property
    def sparsity(self) -> float:
        """Share of the units that is removed at the present step."""
        return self._sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        if sparsity != self._sparsity:
            self._sparsity = sparsity
            self.sparsity_state.fill_(sparsity)
            self._stale = True

    @property
    def steps(self) -> int:
        """Steps of the schedule so far."""
        return self._steps

    def advance(self) -> None:
        """Count a step, and follow the schedule if there is one."""
        self._steps += 1
        self.step_count.fill_(self._steps)
        if self.schedule is not None:
            self.update_sparsity(self._steps)

    def update_sparsity(self, step_count: int) -> None:
        """Bring the sparsity to what the schedule says for ``step_count``; the mask follows if that is something new.

        Raises:
            RuntimeError: there is no schedule.
        """
        if self.schedule is None:
            raise RuntimeError(
                f"{self.tensor_fqn}: update_sparsity needs a schedule, and there is none; set sparsity_schedule."
            )
        self.sparsity = self.schedule.sparsity_at(step_count, self.target_sparsity, self._sparsity)

    def set_mask(self, mask: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Take over a copy of a mask that was made elsewhere, until the sparsity changes.

        Args:
            mask: True or 1 where an entry is kept, in the shape of the weight.
            weight: what it is for: the masked weight lies in memory as the mask does, so that takes this layout.
        """
        self.mask = torch.empty_like(mask if weight is None else weight, dtype=torch.bool).copy_(mask.detach())
        self._stale = False

    def set_input_scale(self, scale: torch.Tensor | None) -> None:
        """Take over what calibration found; the mask is made anew at the next forward."""
        self.input_scale = None if scale is None else scale.detach()
        self._stale = True

    def refresh(self, weight: torch.Tensor) -> None:
        """Make the mask from ``weight`` for the present sparsity."""
        with torch.no_grad():
            self.set_mask(self.build_mask(weight.detach()), weight.detach())

    @property
    def is_stale(self) -> bool:
        """Whether the mask will be made anew at the next forward."""
        return self._stale

    def remember(self) -> Callable[[], None]:
        """Return the function that brings back the mask and what calibration found, as they are now."""
        mask, scale, stale = self.mask, self.input_scale, self._stale

        def bring_back() -> None:
            self.mask, self.input_scale, self._stale = mask, scale, stale

        return bring_back

    @property
    def ranks_scores(self) -> bool:
        """Whether masks follow from ``scores``, rather than from ``compute_mask``."""
        return False

    def build_mask(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a mask for ``weight`` and the present sparsity, without taking it over.

        Args:
            weight: the dense weight.

        Returns:
            True or 1 where an entry is kept, in the shape of ``weight``.
        """
        return self.compute_mask(weight, self._sparsity, self.pruning_scheme)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight`` with the removed entries at zero; they get no gradient.

        Raises:
            ValueError: the scheme does not fit the shape.
        """
        if not self.enabled:
            return weight
        if self._stale:
            self.refresh(weight)
        return torch.where(self.mask, weight, 0.0)

    @classmethod
    def with_args(cls, **kwargs: Any) -> PartialConstructor[Self]:
        """Return a constructor of this class with some arguments given."""
        return with_args(cls, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        has_mask, sparsity = prefix + "mask" in state_dict, self._sparsity
        if has_mask and prefix + "input_scale" not in state_dict:  # from before calibration
            self.input_scale = None
        for name, dtype in _RESIZED.items():
            loaded, own = state_dict.get(prefix + name), self._buffers[name]
            if loaded is not None and (own is None or own.shape != loaded.shape):
                self._buffers[name] = torch.empty(loaded.shape, dtype=dtype, device=self.step_count.device)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        # Checkpoints of coreai-opt know no steps.
        optional = [prefix + name for name in ("step_count", "sparsity_state") if prefix + name in missing]
        for key in optional:
            missing.remove(key)
        if not self.sparsity_state.is_meta:
            self._sparsity, self._steps = float(self.sparsity_state), int(self.step_count)
        if has_mask:
            self._stale = self.mask.numel() == 0
        elif self._sparsity != sparsity:
            self._stale = True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the buffers, but let none of them lose precision to the dtype that a model is cast to."""
        scale = self.input_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.sparsity_state.dtype != torch.float64:
            device = self.sparsity_state.device
            self.sparsity_state = torch.tensor(self._sparsity, dtype=torch.float64, device=device)
        if scale is not None and self.input_scale is not None and self.input_scale.dtype != scale.dtype:
            self.input_scale = scale.to(self.input_scale.device)
        return self

    def extra_repr(self) -> str:
        """Return sparsity and scheme as text."""
        return f"sparsity={self._sparsity:.4g}, scheme={self.pruning_scheme.describe()}, scope={self.scope}"


class _ScoredPruneImpl(PruneImplBase):
    """Removes the units with the smallest scores, within the scope."""

    @staticmethod
    def compute_mask(weight: torch.Tensor, sparsity: float, pruning_scheme: PruningScheme) -> torch.Tensor:
        """Return the mask by magnitude."""
        return pruning_scheme.compute_mask(weight, sparsity)

    @property
    def ranks_scores(self) -> bool:
        """Whether masks follow from ``scores``: not where a subclass has its own ``compute_mask``."""
        return type(self).compute_mask is _ScoredPruneImpl.compute_mask

    def build_mask(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the mask from the scores, or from ``compute_mask`` where a subclass has its own."""
        if not self.ranks_scores:
            return super().build_mask(weight)
        scores = self.scores(weight)
        if self.scope != "row" or not isinstance(self.pruning_scheme, Unstructured) or scores.ndim < 2:
            return self.pruning_scheme.mask_from_scores(scores, self._sparsity)
        parts = scores.reshape(self.row_groups, -1, *scores.shape[1:])
        rows = parts.movedim(self.row_axis + 1, 1)
        kept = keep_largest(rows, self._sparsity, rows.shape[0] * rows.shape[1])
        return kept.movedim(1, self.row_axis + 1).flatten(0, 1)


@PruneImplBase.register("default")
class _MagnitudePruneImpl(_ScoredPruneImpl):
    """By magnitude."""


@PruneImplBase.register("wanda")
class _WandaPruneImpl(_ScoredPruneImpl):
    """By magnitude times the norm of the input, in each row (Sun et al., arXiv 2306.11695, equation 1)."""

    input_statistics: ClassVar[InputStatistics] = "norms"
    default_scope: ClassVar[Scope] = "row"

    def scores(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the magnitudes times the norms of the inputs, once they are known."""
        magnitudes = super().scores(weight)
        return magnitudes if self.input_scale is None else magnitudes * self.input_scale


@PruneImplBase.register("sparsegpt")
class _SparseGPTPruneImpl(_WandaPruneImpl):
    """By the loss of removing an entry when the others make up for it (Frantar and Alistarh, arXiv 2301.00774).

    The loss of entry w in column c is w² / [H⁻¹]cc with H the Gram matrix of the inputs; the scores here are its square
    root. Calibration also moves the entries that are kept.
    """

    input_statistics: ClassVar[InputStatistics] = "gram"
    default_scope: ClassVar[Scope] = "tensor"
