"""The one place that knows torchao, which moves and deletes things every release. Nothing here imports it early."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = [
    "granularity",
    "mapping_type",
    "pt2e",
    "pt2e_quantizer",
    "qat_config_class",
    "register_fake_quantize",
    "zero_point_domain",
]

_FAKE_QUANTIZE_MODULE = "torchao.quantization.pt2e.fake_quantize"


def mapping_type(name: str) -> Any:
    """Return the member of torchao's ``MappingType`` with this name."""
    from torchao.quantization import MappingType

    return MappingType[name]


def pt2e() -> Any:
    """Return torchao's PT2E package: observers, fake quantizers."""
    import torchao.quantization.pt2e as module

    return module


def pt2e_quantizer() -> Any:
    """Return torchao's PT2E package of quantizers: ``Quantizer``, annotations, specs."""
    import torchao.quantization.pt2e.quantizer as module

    return module


def zero_point_domain(name: str) -> Any:
    """Return the member of torchao's ``ZeroPointDomain`` with this name: ``"INT"``, ``"FLOAT"`` or ``"NONE"``."""
    from torchao.quantization.quant_primitives import ZeroPointDomain

    return ZeroPointDomain[name]


def granularity(name: str, *args: Any) -> Any:
    """Return a torchao granularity: its class name (``"PerGroup"``) and its arguments."""
    import torchao.quantization.granularity as module

    return getattr(module, name)(*args)


def qat_config_class(name: str) -> type:
    """Return a class of torchao's QAT configs, such as ``"IntxFakeQuantizeConfig"``.

    Raises:
        AttributeError: the installed torchao has none of this name.
    """
    import torchao.quantization.qat as module

    found: type = getattr(module, name)
    return found


def register_fake_quantize(cls: type) -> None:
    """Make ``cls`` a virtual subclass of torchao's ``FakeQuantizeBase``, now or as soon as torchao is imported.

    torchao's switches (``model.apply(enable_observer)`` and the like) act on whatever is an instance of that abstract
    class. Registering with it, instead of inheriting from it, keeps torchao out of ``import bitwright``.
    """

    def register(module: ModuleType) -> None:
        module.FakeQuantizeBase.register(cls)

    _when_imported(_FAKE_QUANTIZE_MODULE, register)


def _when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    sys.meta_path.insert(0, _PostImportFinder(name, callback))


class _PostImportFinder(MetaPathFinder):
    """Finds one module by asking the other finders, and has a function called right after it is executed."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PostImportLoader(spec.loader, self)
        return spec

    def finish(self, module: ModuleType) -> None:
        """Call the function and leave the list of finders."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._callback(module)


class _PostImportLoader(Loader):
    def __init__(self, loader: Loader, finder: _PostImportFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.finish(module)
