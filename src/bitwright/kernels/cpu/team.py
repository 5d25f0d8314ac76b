"""Jobs on torch's own threads: the OpenMP team of the calling thread.

After an operation, torch's threads wait actively for the next one, for milliseconds. Threads of another pool have to
share the cores with them; the team's threads are there at once. OpenMP has no team after a fork, and not every build of
torch uses it; ``threads`` has threads of its own for these cases.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from bitwright.kernels.environment import chosen

from .compiling import c_address

__all__ = ["run_in_team", "team_runs"]

_Parallel = Callable[[int, int, int, int], None]

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def team_runs() -> bool:
    """Return whether ``run_in_team`` can be used; ``BITWRIGHT_THREADS=own`` says no."""
    return not _forked and _parallel() is not None


@functools.cache
def _parallel() -> _Parallel | None:
    """``GOMP_parallel`` of the OpenMP library that torch runs on, which every OpenMP library for Linux has."""
    has_openmp: bool = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    if chosen("BITWRIGHT_THREADS", ("team", "own")) == "own" or not has_openmp:
        return None
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    parallel: _Parallel = function
    return parallel


def run_in_team(kernel: Callable[..., object], arguments: tuple[int, ...], threads: int) -> None:
    """Call a compiled kernel on every thread of a team.

    Args:
        kernel: what ``compiling.compiled`` returned, with integers as arguments; it must not raise.
        arguments: the same for every thread.
        threads: torch's number of threads, since a team of another size would have to be put together anew.
    """
    parallel = _parallel()
    assert parallel is not None
    job = array("q", (c_address(kernel, len(arguments)), *arguments))
    parallel(_unpacking(len(arguments)), job.buffer_info()[0], threads, 0)


# Owners of machine code.
_engines: list[Any] = []


@functools.cache
def _unpacking(count: int) -> int:
    """Address of a C function of a table: it calls the function whose address comes first with the numbers behind."""
    word = ir.IntType(64)
    module = ir.Module(name=f"unpack_{count}")
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word.as_pointer()]), name=module.name)
    builder = ir.IRBuilder(function.append_basic_block())
    table = function.args[0]
    words = [builder.load(builder.gep(table, [ir.Constant(word, place)])) for place in range(count + 1)]
    called = ir.FunctionType(ir.VoidType(), [word] * count).as_pointer()
    builder.call(builder.inttoptr(words[0], called), words[1:])
    builder.ret_void()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(module.name)
    return address
