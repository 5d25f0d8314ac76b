"""The Triton kernels compile for a GPU, and their code rounds as the reference does. No GPU is needed for that."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bitwright.kernels.cuda import kernels

POINTERS = {
    "scales": "*fp32",
    "points": "*i32",
    "origins": "*fp32",
    "mask": "*i32",
    "data": "*u8",
    "keys": "*i32",
    "lows": "*i32",
    "highs": "*i32",
}
NUMBERS = {"low": "fp32", "high": "fp32", "quant_min": "fp32", "quant_max": "fp32", "new": "fp32", "old": "fp32"}
TENSORS = ("x", "y", "gradient", "out")
RANGES = ("running_lows", "running_highs")
STORED = ["*fp32", "*i16", "*fp16"]


def assembly(kernel: Any, dtype: int, constants: dict[str, Any]) -> str:
    """PTX of a kernel for tensors of a dtype; ptxas has accepted it."""
    types = {**POINTERS, **NUMBERS, **dict.fromkeys(TENSORS, STORED[dtype])}
    types |= dict.fromkeys(RANGES, STORED[constants.get("KEPT", dtype)])
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = compile_for(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


def check(ptx: str) -> None:
    """No fused multiply-add, no approximate division, no denormals flushed to zero."""
    for wrong in (r"\bfma\.", r"\bdiv\.(full|approx)", r"\.ftz"):
        assert not re.search(wrong, ptx)


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("integer", [True, False])
def test_map(dtype: int, integer: bool) -> None:
    """Every operation of the map, in both formulations."""
    for op, origins in itertools.product((0, 1, 2), (False, True)):
        given = {"OP": op, "IN": dtype, "OUT": dtype, "INTEGER": integer, "MASK": op == 0, "OUTER": 4, "SIZE": 1024}
        given |= {"POINTS": integer and not origins, "ORIGINS": integer and origins}
        for together, length in ((False, 0), (False, 32), (True, 0)):
            where = {"PER_ELEMENT": origins and not together, "WIDE": origins, "TOGETHER": together, "LENGTH": length}
            for data in (False, True):
                ptx = assembly(kernels.map_kernel, dtype, given | where | {"DATA": data})
                check(ptx)
                assert ("div.rn.f32" in ptx) == (op != 2)


@pytest.mark.parametrize(("dtype", "kept"), [(0, 0), (1, 1), (2, 2), (1, 0), (2, 0)])
@pytest.mark.parametrize("scheme", [0, 1, 10])
def test_choose_and_rows(dtype: int, kept: int, scheme: int) -> None:
    """Every scheme and every way of keeping a running range, of the tensor's dtype or float32."""
    integer = scheme < 2
    stored = {"DTYPE": dtype, "KEPT": kept, "SCHEME": scheme, "INTEGER": integer, "RUNNING": True}
    for mode in (0, 1, 2):
        given = stored | {"MODE": mode, "KEYS": True, "PARTS": 1024 * mode, "SIZE": 256}
        check(assembly(kernels.choose_kernel, dtype, given))
        given = stored | {"MODE": mode, "PARTS": 1 << 4 * mode, "WIDE": mode == 1, "SIZE": 1024}
        check(assembly(kernels.track_whole_kernel, dtype, given))
    for data in (False, True):
        given = stored | {"MINVAL": scheme == 1, "MASK": True, "DATA": data, "RUNNING": scheme == 0, "MODE": 1}
        check(assembly(kernels.observe_rows_kernel, dtype, given | {"WIDE": False, "ROWS": 4, "COLUMNS": 1024}))


@pytest.mark.parametrize("dtype", [0, 1, 2])
def test_range_and_mask(dtype: int) -> None:
    """Ranges and gradients."""
    given = {"DTYPE": dtype, "OUTER": 3, "WIDE": True, "ROWS": 4, "COLUMNS": 1024}
    check(assembly(kernels.range_kernel, dtype, given))
    check(assembly(kernels.partial_ranges_kernel, dtype, {"DTYPE": dtype, "WIDE": True, "SIZE": 1024}))
    check(assembly(kernels.mask_kernel, dtype, {"DTYPE": dtype, "WIDE": False, "SIZE": 1024}))
