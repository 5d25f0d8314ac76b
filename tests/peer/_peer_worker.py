"""Reads functions from standard input, runs them, writes what they return: the peer's side of ``_peer.py``."""

from __future__ import annotations

import io
import logging
import os
import struct
import sys
import traceback
import warnings
from typing import Any, BinaryIO

import torch


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the function that a request holds."""
    # __future__ flags of this file do not reach the compiled source, which may have annotations it cannot evaluate.
    source = "from __future__ import annotations\n" + request["source"]
    names: dict[str, Any] = {"__name__": "peer_function", "torch": torch, "Any": Any}
    try:
        exec(compile(source, request["name"], "exec", dont_inherit=True), names)
        return {"result": names[request["name"]](request["package"], request["payload"])}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}


def begin_averages_after_zeros() -> None:
    """Let the peer's moving average begin after tensors of zeros, as ours does (docs/differences.md)."""
    from coreai_opt.quantization.spec import MovingAverageQParamsCalculator

    update = MovingAverageQParamsCalculator.update_running_range

    def updated(self: Any, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blank = (self.running_min == 0) & (self.running_max == 0)
        low, high = update(self, min_val, max_val)
        return torch.where(blank, min_val, low), torch.where(blank, max_val, high)

    MovingAverageQParamsCalculator.update_running_range = updated


def main() -> None:
    """Answer requests until the input ends."""
    requests: BinaryIO = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints must not mix with answers
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    begin_averages_after_zeros()
    while len(header := requests.read(8)) == 8:
        (size,) = struct.unpack("<Q", header)
        request = torch.load(io.BytesIO(requests.read(size)), weights_only=True)
        buffer = io.BytesIO()
        torch.save(answer(request), buffer)
        answers.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())
        answers.flush()


if __name__ == "__main__":
    main()
