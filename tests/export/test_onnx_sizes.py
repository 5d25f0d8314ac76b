"""Arithmetic on dynamic sizes in ONNX files: what Python computes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.export.onnx import export_onnx, run_onnx


class Padded(nn.Module):
    """Pads rows to whole windows, and by quotients."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.shape[0]
        return (
            F.pad(x, (0, 0, 0, -rows % 4)),
            F.pad(x, (0, 0, 0, -(-rows // 4) * 4 - rows)),
            F.pad(x, (0, 0, 0, 7 + (3 - rows) // 3)),
            x[: rows // 2],
        )


@pytest.mark.parametrize("captured", [5, 8])
def test_sizes_are_divided_as_python_does(captured: int, tmp_path: Path) -> None:
    """It rounds down; a size that is never negative takes no more operators for that."""
    x = torch.randn(captured, 3)
    shapes = ({0: torch.export.Dim.DYNAMIC(min=2, max=16)},)
    path = export_onnx(Padded(), (x,), tmp_path / "m.onnx", dynamic_shapes=shapes)
    for rows in (2, 3, 4, 7, 8, 13, 16):
        other = torch.randn(rows, 3)
        for found, expected in zip(run_onnx(path, (other,)), Padded()(other), strict=True):
            assert torch.equal(found, expected)
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert operators.count("Div") == 3
    assert operators.count("Mod") == 2  # of negative numbers by 4, and by 3
