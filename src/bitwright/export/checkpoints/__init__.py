"""Checkpoints that other tools load: compressed-tensors for vLLM and transformers, GGUF for llama.cpp."""

from __future__ import annotations

from .compressed_tensors import export_compressed_tensors
from .gguf import export_gguf
from .reading import read_compressed_tensors, read_gguf

__all__ = ["export_compressed_tensors", "export_gguf", "read_compressed_tensors", "read_gguf"]
