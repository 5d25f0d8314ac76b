"""Weights that stay packed in memory: parametrizations that decode on use, by plain torch ops when traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

from bitwright._utils.packed_weights import PackedWeight
from bitwright._utils.parametrization import own_parametrizations, parametrize_tensor
from bitwright.kernels.dispatch import undisturbed
from bitwright.kernels.packed import PackedMatrix

from .compress import compress_tensor, register_encoder
from .lazy import LazyWeight
from .pickled import as_before, as_read_by_torch
from .sites import activation_simulators, weight_sites
from .tensors import CompressedTensor, QuantizedTensor, build_tensor, recast

__all__ = ["PackedTensor", "pack_model", "pack_tensor", "replace_weight"]


class PackedTensor(PackedWeight):
    """A parametrization that ignores its input and returns the decoded tensor.

    The parts of the compressed tensor are its buffers, a dot in their names replaced by ``_``. ``torch.export`` and
    ``torch.compile`` see the decoding as plain torch ops on the packed buffers, so an exported program needs nothing of
    Bitwright. ``.to(device)`` moves the buffers; ``.half()`` and the like change what is decoded to, not the buffers.

    Args:
        tensor: the compressed tensor.
        exact: decode for more than a few vectors, also where multiplying with the codes is faster: behind quantized
            activations another order of sums may move a code.
        dtype: what is decoded to; None for the tensor's.
    """

    def __init__(self, tensor: CompressedTensor[Any], *, exact: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.exact = exact
        self.layout = tensor.layout
        self.output_dtype = tensor.dtype if dtype is None else dtype
        for name, part in tensor.parts.items():
            if part.is_inference():
                with torch.inference_mode(False):  # inference tensors do not tell whether they were written to
                    part = part.clone()
            self.register_buffer(name.replace(".", "_"), part)

    @property
    def tensor(self) -> CompressedTensor[Any]:
        """The compressed tensor, made of the buffers as they are."""
        parts = {name: self._buffers[name.replace(".", "_")] for name in self.layout.parts()}
        return build_tensor(self.layout, parts)  # type: ignore[arg-type]

    def forward(self, _: torch.Tensor | None = None) -> torch.Tensor:
        """Return the decoded tensor, or one that is decoded when its numbers are wanted."""
        if not _traced():
            matrix = self._matrix_of_buffers()
            if matrix is not None and matrix.runs_to(self.output_dtype):
                return LazyWeight(matrix, self.output_dtype, self.exact)
        return self.tensor.decode().to(self.output_dtype)

    def _matrix_of_buffers(self) -> PackedMatrix | None:
        """The buffers as a matrix of codes, made once and kept until they change."""
        state = [(buffer, _version(buffer)) for buffer in self._buffers.values() if buffer is not None]
        kept = self.__dict__.get("_kept")
        if (
            kept is None
            or len(kept[0]) != len(state)
            or any(
                old is not new or now is None or before != now
                for (old, before), (new, now) in zip(kept[0], state, strict=True)
            )
        ):
            tensor = self.tensor
            kept = self.__dict__["_kept"] = (state, tensor.matrix() if isinstance(tensor, QuantizedTensor) else None)
        matrix: PackedMatrix | None = kept[1]
        return matrix

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: not the matrix, which is made of the buffers."""
        state = {key: value for key, value in self.__dict__.items() if key != "_kept"}
        buffers, dtypes = as_read_by_torch(self._buffers)
        return {**state, "_buffers": buffers, "_dtypes": dtypes} if dtypes else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what :meth:`__getstate__` returned."""
        dtypes = state.get("_dtypes", {})
        kept = {key: value for key, value in state.items() if key != "_dtypes"}
        super().__setstate__(kept)  # type: ignore[no-untyped-call]
        if dtypes:
            self._buffers = as_before(self._buffers, dtypes)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.output_dtype = fn(torch.empty(0, dtype=self.output_dtype)).dtype
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def extra_repr(self) -> str:
        """Return shape and size as text."""
        return f"{self.layout.kind}, shape={tuple(self.layout.shape)}, {self.layout.nbytes} bytes"


def _held(module: PackedTensor, tensor: torch.Tensor, mask: torch.Tensor | None) -> CompressedTensor[Any]:
    """Encode what is encoded already."""
    return recast(module.tensor, module.output_dtype)


register_encoder(PackedTensor, _held)


def _version(buffer: torch.Tensor) -> int | None:
    """How often a buffer was written to; None if that is not counted."""
    return None if buffer.is_inference() else buffer._version


def _traced() -> bool:
    """Whether somebody watches the operations, and has to see plain ones."""
    return torch.compiler.is_compiling() or not undisturbed() or bool(torch._C._len_torch_function_stack())


def pack_tensor(
    owner: nn.Module,
    attribute: str,
    tensor: CompressedTensor[Any],
    module: nn.Module | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Replace a parameter of a module by its packed form.

    Args:
        owner: the module.
        attribute: name of its parameter; whatever parametrizes it is taken away.
        tensor: the compressed tensor.
        module: the parametrization to use, to share the one of a tied weight.
        dtype: what is decoded to; None for the tensor's.

    Returns:
        The parametrization that now stands there.
    """
    module = PackedTensor(tensor, dtype=dtype) if module is None else module
    return replace_weight(owner, attribute, module, tensor.dtype if dtype is None else dtype)


def replace_weight(owner: nn.Module, attribute: str, module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make ``owner.<attribute>`` read as ``module(placeholder)``; the dense tensor becomes an empty placeholder.

    Both are where the dense tensor was; on the CPU if that was on the meta device.
    """
    kind: type[nn.Parameter] | None = nn.Parameter
    stack = own_parametrizations(owner).get(attribute)
    if stack is not None:
        if not isinstance(getattr(stack, "original", None), nn.Parameter):
            kind = None
        parametrize.remove_parametrizations(owner, attribute, leave_parametrized=not stack.is_tensor)
    device = getattr(owner, attribute).device
    if attribute in owner._buffers:
        kind = None
    placeholder = torch.empty(0, dtype=dtype, device="cpu" if device.type == "meta" else device)
    if kind is None:
        owner._parameters.pop(attribute, None)
        owner._buffers[attribute] = placeholder
    else:
        owner._buffers.pop(attribute, None)
        owner._parameters[attribute] = nn.Parameter(placeholder, requires_grad=False)
    parametrize_tensor(owner, attribute, module.to(placeholder.device))
    return module


def pack_model(model: nn.Module) -> nn.Module:
    """Turn a prepared eager model into one whose weights stay packed in memory.

    Weight simulators are replaced by :class:`PackedTensor`; activation simulators stay as they are, so the model
    computes what it computed before, and can be exported with ``torch.export``.

    Args:
        model: a prepared model. Changed in place, and only after every weight was packed without error. Weights that
            are packed already stay as they are.

    Returns:
        ``model``, in eval mode.

    Raises:
        ArtifactError: a weight cannot be stored so that it decodes to what the model computes.
    """
    exact = bool(activation_simulators(model))
    packed = [(site, compress_tensor(site.tensor, site.simulators, site.name)) for site in weight_sites(model)]
    for site, tensor in packed:
        module: nn.Module | None = None
        for path, attribute in site.owners:
            if module is None:
                module = PackedTensor(tensor, exact=exact)
            pack_tensor(model.get_submodule(path), attribute, tensor, module)
    return model.eval()
