"""How a fake quantizer observes and quantizes what passes through it, with no step that changes nothing."""

from __future__ import annotations

import contextlib
import logging
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from bitwright import kernels
from bitwright._utils.call_frames import is_in_branch
from bitwright._utils.direct_calls import Call, caller, pass_through
from bitwright._utils.sharded import is_sharded, on_whole
from bitwright.config.spec import CompressionTargetTensor
from bitwright.kernels import Grid, Task
from bitwright.kernels.dispatch import undisturbed
from bitwright.kernels.remade import remember_making

from ._block_layout import BlockLayout
from ._one_pass import (
    follows_latest,
    has_bounds_of,
    is_plainly_static,
    is_settled_dynamic,
    measures_both_ends,
    tracks_in_place,
)
from ._recall import Recall, will_be_repeated
from ._running_range import RunningRangeMixin
from ._shortcut import following, is_repeated, observing, quantizing, remembering
from ._switches import SwitchedModule
from ._weight_memory import WeightMemory, measurement
from .errors import _BlockSizeMismatchError
from .granularity import QuantizationGranularity
from .qformulation import QuantizationFormulation
from .qparams_calculator import QParams, QParamsCalculatorBase, StatefulQParamsCalculatorBase

__all__ = ["FakeQuantizeForward"]

_logger = logging.getLogger(__name__)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class FakeQuantizeForward(SwitchedModule):
    """The ``forward`` of fake quantizers; subclasses say what quantizing is.

    Attributes:
        keep_frozen_weight: in eval mode, a weight that is no longer observed is quantized once and its result kept
            until the weight or its parameters change. False saves the memory and quantizes at every call.
    """

    keep_frozen_weight: bool = True
    tensor_fqn: str
    dtype: torch.dtype
    qformulation: QuantizationFormulation
    quant_min: int | float
    quant_max: int | float
    _granularity: QuantizationGranularity

    def __init__(self) -> None:
        super().__init__()
        self._layout = BlockLayout()
        self._grid: Grid | None = None
        self._memory = WeightMemory()
        self._recall = Recall()

    @property
    @abstractmethod
    def quantization_target(self) -> CompressionTargetTensor:
        """What the tensor is."""

    @abstractmethod
    def _fake_quantize(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        minval: torch.Tensor | None,
    ) -> torch.Tensor:
        """Fake-quantize and return the tensor's own dtype."""

    def _is_fused(self) -> bool:
        """Return whether one kernel may do what the overridable methods describe."""
        return False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Observe and fake-quantize ``tensor``, as far as each is on.

        Args:
            tensor: floating point, any shape that the granularity fits. Arithmetic is float32.

        Returns:
            Tensor of the same shape and dtype. The gradient is that of the identity where nothing is clamped, zero
            elsewhere. Scale, zero point and minval get no gradient.

        Raises:
            ValueError: the granularity does not fit the shape. Blocks that do not divide it are no error: the
                quantizer logs a warning and takes itself out of use.
            RuntimeError: the observer is off and no tensor has been observed.
        """
        if not torch.compiler.is_compiling():
            shortcut = self._shortcut.call
            if shortcut is not None:
                y = shortcut(self, tensor, False)
                if y is not None:
                    return y
        return self._go_long_way(tensor, False)

    _direct_forward = forward

    def note_places(self, places: int) -> None:
        """Note at how many places of a model this simulator stands; a forward moves its range once, by all of them."""
        calculator: Any = self._modules["qparams_calculator"]
        if isinstance(calculator, RunningRangeMixin):
            calculator.tensors_per_step = places

    def task_for(self, weight: torch.Tensor) -> Task | None:
        """Return what a call does to a computed weight; None where it does something else too, such as calling hooks.

        For a gradient that passes through more than the simulator. Doing the task twice is doing it once.
        """
        shortcut = self._shortcut
        if caller() is not pass_through or not (shortcut.direct or shortcut.ask(self)):
            return None
        if shortcut.task is None and self._fake_quant_on and not self._is_off and self._is_fused():
            self._shorten(following, weight, self._modules["qparams_calculator"])
        return None if shortcut.task is None else shortcut.task(self, weight)

    def _go_long_way(self, tensor: torch.Tensor, unneeded: bool) -> torch.Tensor:
        tracing = torch.compiler.is_compiling()
        if not tracing:
            self._sync_switches()
            self._keep_with(tensor)
        if self._is_off:
            return tensor
        if type(tensor) not in _PLAIN and is_sharded(tensor):
            return on_whole(self.forward, tensor)
        calculator: Any = self._modules["qparams_calculator"]
        stateful = isinstance(calculator, StatefulQParamsCalculatorBase)
        if stateful and not tracing and type(tensor) is torch.nn.Parameter:
            return self._forward_weight(tensor, calculator)
        qparams: QParams | None = None
        if not stateful or (self._observer_on and not calculator.is_frozen):
            y = None if tracing else self._at_once(tensor, calculator, unneeded)
            if y is not None:
                return y
            if tracing or tensor.numel():
                qparams = self._observe(tensor, calculator)
        elif self._fake_quant_on and (tracing or tensor.numel()):
            qparams = self._stored(calculator)
            self._refuse_other_blocks(tensor.shape, qparams[0])
        if qparams is None or not self._fake_quant_on:
            return tensor
        if stateful and not tracing and not self._observer_on:
            shortcut = self._shorten(quantizing, tensor, calculator)
            y = None if shortcut is None else shortcut(self, tensor, unneeded)
            if y is not None:
                return y
        return self._fake_quantize(tensor, *qparams)

    def _keep_with(self, tensor: torch.Tensor) -> None:
        """Move the switches to the device of what passes through, as calculators do with what they keep."""
        switch, there = self._buffers["_disabled"], tensor.device
        if switch is None or switch.device == there or there.type == "meta":
            return
        if type(tensor) in _PLAIN and undisturbed():
            self._move_switches(there)

    def _shorten(
        self,
        make: Callable[[Any, Any, torch.Tensor], Call | None],
        tensor: torch.Tensor,
        calculator: Any,
    ) -> Call | None:
        """Make the short way for this tensor and the next ones like it, and return it; None where there is none."""
        if not (tensor.is_cpu or tensor.is_cuda):
            return None
        stateful = isinstance(calculator, StatefulQParamsCalculatorBase)
        plain = stateful and type(calculator).get_qparams is StatefulQParamsCalculatorBase.get_qparams
        shortcut = self._shortcut
        task = shortcut.task
        call = make(self, calculator, tensor) if plain and self._is_fused() else None
        if call is not None:
            shortcut.call = call
            if shortcut.task is task:
                shortcut.task = None  # that of the short way before
        return call

    def _at_once(self, tensor: torch.Tensor, calculator: Any, unneeded: bool) -> torch.Tensor | None:
        """Observe and fake-quantize in one kernel call, where the classes are Bitwright's own; None where not."""
        if not self._is_fused() or _is_in_backward() or not tensor.numel():
            return None
        if follows_latest(calculator):
            if self._fake_quant_on and has_bounds_of(calculator, self):
                return self._follow(tensor, calculator)
            return tensor if not self._fake_quant_on and is_settled_dynamic(calculator) else None
        if not (tracks_in_place(calculator, tensor.dtype, tensor.device) and has_bounds_of(calculator, self)):
            return None
        with contextlib.suppress(_BlockSizeMismatchError):  # the calculator meets it again and says so
            self._block_size(tensor.shape)
            if self._layout.counts == calculator._buffers["running_min"].shape:
                shortcut = self._shorten(observing, tensor, calculator)
                y = None if shortcut is None else shortcut(self, tensor, unneeded)
                return self._track(tensor, calculator) if y is None else y
        return None

    def _track(self, tensor: torch.Tensor, calculator: Any) -> torch.Tensor:
        """Update a running range and fake-quantize, in one call that changes the calculator's buffers in place."""
        buffers = calculator._buffers
        y = kernels.observe_running_and_fake_quantize(
            tensor,
            buffers["running_min"],
            buffers["running_max"],
            buffers["scale"],
            buffers["zero_point"],
            buffers["minval"],
            block_size=self._block_size(tensor.shape),
            grid=self._current_grid(),
            scheme=calculator.qscheme.value,
            scale_dtype=calculator.scale_dtype,
            averaging_constant=getattr(calculator, "averaging_constant", None),
            restart=calculator._progress.restart,
            quantize=self._fake_quant_on,
        )
        calculator._progress.count()
        if will_be_repeated(self.training, False):
            self._recall.note(tensor, self._stored(calculator))
        return y

    def _follow(self, tensor: torch.Tensor, calculator: Any) -> torch.Tensor:
        """Take the range of this tensor alone and fake-quantize; the tensor itself if blocks do not divide it."""
        try:
            block_size = self._block_size(tensor.shape)
        except _BlockSizeMismatchError as error:
            self._warn_and_disable(error)
            return tensor
        y, scale, zero_point, minval = kernels.observe_and_fake_quantize(
            tensor,
            block_size=block_size,
            grid=self._current_grid(),
            scheme=calculator.qscheme.value,
            scale_dtype=calculator.scale_dtype,
        )
        calculator._record(tensor, (scale, zero_point, minval))
        return y

    def _forward_weight(self, weight: torch.nn.Parameter, calculator: StatefulQParamsCalculatorBase) -> torch.Tensor:
        """``forward`` for a parameter, which often is the same as at the last call."""
        if weight.numel() == 0 or not (self._observer_on or self._fake_quant_on):
            return weight
        memory, static = self._memory, is_plainly_static(calculator)
        known = calculator._initialized and memory.knows(weight, self._stored(calculator), self._current_grid())
        y: torch.Tensor | None = None
        qparams: QParams | None
        measured = known and static and memory.measured_with == measurement(calculator)
        if self._observer_on and not (static and (calculator.is_frozen or measured)):
            y, qparams = self._observe_weight(weight, calculator, static)
            known = False
        else:
            qparams = self._stored(calculator) if self._fake_quant_on else None
        if qparams is None or not self._fake_quant_on:
            return weight
        settled = static or not self._observer_on
        if settled and self.keep_frozen_weight and not self.training and not _needs_grad(weight):
            return self._kept(weight, calculator, known, y)
        if not is_repeated(self):
            self._shorten(following, weight, calculator)
        if y is None:
            y = self._fake_quantize(weight, *qparams)
        if self._is_fused() and not self._is_off:
            remember_making(y, weight, qparams, self._block_size(weight.shape), self._current_grid())
        return y

    def _observe_weight(
        self, weight: torch.nn.Parameter, calculator: StatefulQParamsCalculatorBase, static: bool
    ) -> tuple[torch.Tensor | None, QParams | None]:
        """Observe a parameter, in one pass with its quantization where the classes are Bitwright's own."""
        fused = static and self._fake_quant_on and self._is_fused()
        if fused and measures_both_ends(calculator) and has_bounds_of(calculator, self):
            y = self._follow(weight, calculator)
            qparams: QParams | None = None if self._is_off else self._stored(calculator)
        else:
            y, qparams = None, self._observe(weight, calculator)
        if static and qparams is not None:
            stored, grid = self._stored(calculator), self._current_grid()
            self._memory.remember(weight, stored, grid, measured_with=measurement(calculator))
        return y, qparams

    def _kept(
        self,
        weight: torch.nn.Parameter,
        calculator: StatefulQParamsCalculatorBase,
        known: bool,
        y: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the quantized weight from memory, or quantize it (unless ``y`` is it) and keep it."""
        kept = self._memory.output if known else None
        if kept is not None:
            self._shorten(remembering, weight, calculator)
            return kept
        qparams = self._stored(calculator)
        if not known and y is None:
            self._memory.remember(weight, qparams, self._current_grid())
        if y is None or y.is_inference():  # which would be of no use outside inference mode
            with torch.inference_mode(False), torch.no_grad():
                y = self._fake_quantize(weight, *qparams)
        self._memory.keep(y)
        return y

    def _observe(self, tensor: torch.Tensor, calculator: QParamsCalculatorBase) -> QParams | None:
        """Let the calculator see ``tensor``; None if its blocks do not divide it."""
        # A recomputed forward (gradient checkpointing) must quantize as the first one did, and not count twice.
        stateful = isinstance(calculator, StatefulQParamsCalculatorBase)
        if stateful and calculator._initialized and _is_in_backward():
            return self._recall.find(tensor) or self._stored(calculator)
        if stateful and calculator._initialized and is_in_branch():
            return self._in_branch(tensor, calculator)
        try:
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
                qparams: QParams = calculator(tensor)
        except _BlockSizeMismatchError as error:
            self._warn_and_disable(error)
            return None
        except ValueError as error:
            raise ValueError(f"{self.tensor_fqn}: {error}") from error
        if stateful and not torch.compiler.is_compiling() and self._may_be_repeated(calculator):
            self._recall.note(tensor, qparams)
        return qparams

    def _in_branch(self, tensor: torch.Tensor, calculator: Any) -> QParams:
        """Return the parameters for a tensor inside of a branch, where nothing may be stored.

        ``torch.cond`` saves what it reads for the backward, so none of it may be what a later call writes to.
        """
        if not is_plainly_static(calculator):
            return self._stored(calculator)
        tensor = tensor.detach()
        qparams: QParams = calculator.compute_qparams(tensor, *calculator._get_min_and_max_val(tensor))
        return qparams

    def _may_be_repeated(self, calculator: Any) -> bool:
        return will_be_repeated(self.training, getattr(calculator, "tensors_per_step", 1) > 1)

    def _stored(self, calculator: Any) -> QParams:
        """Return the parameters that the calculator keeps.

        Raises:
            RuntimeError: it has seen no tensor yet.
        """
        if type(calculator).get_qparams is StatefulQParamsCalculatorBase.get_qparams:
            buffers = calculator._buffers
            qparams: QParams = buffers["scale"], buffers["zero_point"], buffers["minval"]
        else:
            qparams = calculator.get_qparams()
        if qparams[0].numel() == 0:
            raise RuntimeError(
                f"The quantizer of {self.tensor_fqn!r} has no scale, because its observer has seen no tensor. Run "
                "prepare or a calibration batch through it, load a calibrated state_dict, or turn its observer on."
            )
        return qparams

    def _refuse_other_blocks(self, shape: torch.Size, scale: torch.Tensor) -> None:
        """Refuse a tensor with more or fewer blocks than the stored parameters are for.

        Raises:
            ValueError: there is neither one scale nor one per block, which classes of Bitwright's own need.
        """
        if scale.numel() == 1 or not self._is_fused():
            return
        sizes = zip(shape, self._block_size(shape), strict=True)
        counts = tuple(1 if size == block else size // block for size, block in sizes)
        if scale.numel() != math.prod(counts):
            raise ValueError(
                f"The quantizer of {self.tensor_fqn!r} has a scale of shape {tuple(scale.shape)}, which does not fit "
                f"the {counts} blocks of a tensor of shape {tuple(shape)}. Static scales per block or channel hold for "
                "the sizes of calibration alone, since they are one for each row of the batch and each token too where "
                "the blocks have such a dimension: use qparam_calculator_cls='dynamic', or per_tensor."
            )

    def _current_grid(self) -> Grid:
        grid = self._grid
        if grid is None or (grid.dtype, grid.quant_min, grid.quant_max, grid.formulation) != (
            self.dtype,
            self.quant_min,
            self.quant_max,
            self.qformulation,
        ):
            formulation = QuantizationFormulation(self.qformulation).value
            grid = Grid(self.dtype, self.quant_min, self.quant_max, formulation)
            if not torch.compiler.is_compiling():  # a traced change of an attribute would have the graph compiled anew
                self._grid = grid
        return grid

    def _warn_and_disable(self, error: Exception) -> None:
        _logger.warning("%s (%s) is not quantized: %s.", self.tensor_fqn, self.quantization_target.value, error)
        self._set_switch("_disabled", True)

    def _block_size(self, shape: torch.Size) -> tuple[int, ...]:
        calculator: Any = self._modules["qparams_calculator"]
        target = calculator._modules["range_calculator"].quantization_target
        try:
            return self._layout.block_size(shape, self._granularity, target)
        except _BlockSizeMismatchError:
            raise
        except ValueError as error:
            raise ValueError(f"{self.tensor_fqn}: {error}") from error


def _is_in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _needs_grad(weight: torch.Tensor) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()
