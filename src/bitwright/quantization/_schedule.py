"""QAT schedules applied to a model: switches of simulators, their bits, and the mode of batch norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase

from ._bits import dtype_with_bits, set_dtype
from ._statistics import has_searched_range

__all__ = ["ScheduleDriver", "batch_norms", "observers_off", "rest", "switch"]


class ScheduleDriver:
    """Brings a model into the state that its schedules give for the current step.

    Args:
        schedules: schedule by the simulator's name in the prepared model (``named_modules`` name, the first alias).
        by_module: schedule by module path in the original model, for batch norms.
    """

    def __init__(
        self, schedules: Mapping[str, QATSchedule], by_module: Mapping[str, QATSchedule] | None = None
    ) -> None:
        self._schedules = dict(schedules)
        self._by_module = dict(by_module or {})
        self._dtypes: dict[str, torch.dtype] = {}
        self._due: set[str] = set()
        self._frozen: list[_StayInEvaluation] = []
        self.step_count = 0
        #: Whether searched ranges of activations were measured by a calibration, and stay.
        self.measured = False

    def __bool__(self) -> bool:
        return bool(self._schedules) or any(s.freeze_batch_norm is not None for s in self._by_module.values())

    def apply(self, model: nn.Module) -> None:
        """Bring every scheduled simulator and batch norm of ``model`` into the state for the current step."""
        for simulator, schedule in self._scheduled(model):
            state = schedule._compute_state(self.step_count)
            stays = self.measured and schedule._leaves_observers and has_searched_range(simulator)
            switch(simulator, observer=state.obs_on and not stays, fake_quant=state.fq_on)
        self.apply_bits(model)
        self._apply_batch_norms(model)

    def apply_bits(self, model: nn.Module, *, rescale: bool = True) -> None:
        """Give every scheduled simulator the bits of the current step."""
        for name, simulator, schedule in self._named(model):
            if schedule.least_bits:
                final = self._dtypes.setdefault(name, simulator.dtype)
                set_dtype(simulator, dtype_with_bits(final, schedule._bits_at(self.step_count)), rescale=rescale)

    @contextmanager
    def finished_bits(self, model: nn.Module, *, stay: bool) -> Iterator[list[str]]:
        """Give every simulator the bits of its spec.

        Args:
            model: a scheduled model.
            stay: whether they keep them when the block ends well; after an error they never do.

        Yields:
            The names of those that had others.
        """
        before = {
            name: (simulator, simulator.dtype, {key: state.clone() for key, state in simulator.state_dict().items()})
            for name, simulator, _ in self._named(model)
            if simulator.dtype != self._dtypes.get(name, simulator.dtype)
        }
        try:
            for name, (simulator, _, _) in before.items():
                set_dtype(simulator, self._dtypes[name])
            yield list(before)
        except BaseException:
            stay = False
            raise
        finally:
            for simulator, dtype, states in before.values() if not stay else ():
                set_dtype(simulator, dtype, rescale=False)
                simulator.load_state_dict(states)

    def release(self) -> None:
        """Let batch norms follow the mode of the model again."""
        for frozen in self._frozen:
            frozen.remove()
        self._frozen, self._due = [], set()

    def _named(self, model: nn.Module) -> Iterator[tuple[str, FakeQuantizeImplBase, QATSchedule]]:
        for name, simulator in model.named_modules():
            schedule = self._schedules.get(name)
            if schedule is not None and isinstance(simulator, FakeQuantizeImplBase):
                yield name, simulator, schedule

    def _scheduled(self, model: nn.Module) -> Iterator[tuple[FakeQuantizeImplBase, QATSchedule]]:
        for _, simulator, schedule in self._named(model):
            yield simulator, schedule

    def _apply_batch_norms(self, model: nn.Module) -> None:
        due = {
            path
            for path, schedule in self._by_module.items()
            if schedule.freeze_batch_norm is not None and self.step_count >= schedule.freeze_batch_norm
        }
        if due != self._due:
            self._due = due
            self._frozen = [_StayInEvaluation.of(module) for path, module in batch_norms(model) if path in due]
        for frozen in self._frozen:
            frozen.module.training = False


class _StayInEvaluation:
    """Takes the place of a module's ``train``: the module stays in evaluation mode, its children follow.

    An attribute of the instance, which survives deepcopy and pickle. A hook that changes the mode before each forward
    would be nothing that ``torch.compile`` guards.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[[bool], Any] | None = module.__dict__.get("train")

    @classmethod
    def of(cls, module: nn.Module) -> _StayInEvaluation:
        """Return the one that stands in ``module``, as in a copy that was made in training, or put one there."""
        present = module.__dict__.get("train")
        if not isinstance(present, cls):
            present = module.__dict__["train"] = cls(module)
        return present

    def __call__(self, mode: bool = True) -> nn.Module:
        if self.inner is not None:
            self.inner(mode)
        else:
            type(self.module).train(self.module, mode)
        self.module.training = False
        return self.module

    def remove(self) -> None:
        """Put back what stood here before; the module stays in the mode that it is in."""
        if self.inner is not None:
            self.module.__dict__["train"] = self.inner
        else:
            self.module.__dict__.pop("train", None)


def batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that use a batch norm's running statistics, with its path in the original model.

    In a graph, one that has several paths comes with each of them.
    """
    if isinstance(model, fx.GraphModule):
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for node in model.graph.nodes:
            if node.op != "call_module":
                continue
            for source in node.all_input_nodes:
                if source.op == "get_attr" and str(source.target).rpartition(".")[2] == "running_var":
                    module = model.get_submodule(str(node.target))
                    behind = module.behind if isinstance(module, FakeQuantizeImplBase) else None
                    read = str(source.target)
                    names = [name for name, buffer in buffers.items() if name == read or buffer is buffers.get(read)]
                    for name in names or [read]:
                        yield name.rpartition(".")[0], module if behind is None else behind
                    break
        return
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield path, module


def switch(simulator: FakeQuantizeImplBase, *, observer: bool, fake_quant: bool) -> None:
    """Turn a simulator's observer and its fake quantization on or off."""
    (simulator.enable_observer if observer else simulator.disable_observer)()
    (simulator.enable_fake_quant if fake_quant else simulator.disable_fake_quant)()


def rest(model: nn.Module) -> None:
    """Turn observers off and fake quantization on, as they are outside of calibration and training."""
    for simulator in _simulators(model):
        switch(simulator, observer=False, fake_quant=True)


@contextmanager
def observers_off(model: nn.Module) -> Iterator[None]:
    """Turn the observers of ``model`` off, and those that were on on again on exit."""
    observing = [simulator for simulator in _simulators(model) if simulator.is_observing()]
    for simulator in observing:
        simulator.disable_observer()
    try:
        yield
    finally:
        for simulator in observing:
            simulator.enable_observer()


def _simulators(model: nn.Module) -> list[FakeQuantizeImplBase]:
    return [module for module in model.modules() if isinstance(module, FakeQuantizeImplBase)]
