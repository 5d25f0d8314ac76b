"""Names that coreai-opt keeps here, for code written for it."""

from __future__ import annotations

from bitwright.common import CompressionType
from bitwright.export.coreml_weights import METADATA_PREFIX as STATE_DICT_METADATA_BUFFER_PREFIX
from bitwright.export.coreml_weights import METADATA_VERSION as METADATA_VERSION_VALUE

__all__ = [
    "BUFFER_NAME_SEPARATOR",
    "METADATA_VERSION_BUFFER",
    "METADATA_VERSION_VALUE",
    "STATE_DICT_METADATA_BUFFER_PREFIX",
    "CompressionType",
]

BUFFER_NAME_SEPARATOR = "/"
METADATA_VERSION_BUFFER = f"{STATE_DICT_METADATA_BUFFER_PREFIX}{BUFFER_NAME_SEPARATOR}metadata_version"
