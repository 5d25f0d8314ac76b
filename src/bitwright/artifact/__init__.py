"""What compression produced, for no target in particular: packed codes, scales, look-up tables, masks."""

from __future__ import annotations

from . import simulators as simulators
from .activations import QuantizedActivation
from .artifact import Artifact
from .compress import compress_tensor, register_encoder
from .encode import dense_tensor, palettized_tensor, quantized_tensor
from .errors import ArtifactError
from .layouts import ActivationLayout, DenseLayout, PalettizedLayout, QuantizedLayout, TensorLayout
from .packed import PackedTensor, pack_model
from .tensors import CompressedTensor, DenseTensor, PalettizedTensor, QuantizedTensor

__all__ = [
    "ActivationLayout",
    "Artifact",
    "ArtifactError",
    "CompressedTensor",
    "DenseLayout",
    "DenseTensor",
    "PackedTensor",
    "PalettizedLayout",
    "PalettizedTensor",
    "QuantizedActivation",
    "QuantizedLayout",
    "QuantizedTensor",
    "TensorLayout",
    "compress_tensor",
    "dense_tensor",
    "pack_model",
    "palettized_tensor",
    "quantized_tensor",
    "register_encoder",
]
