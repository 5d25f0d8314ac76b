"""Which simulators stand on which function calls: a plan, read call by call."""

from __future__ import annotations

from bitwright._utils.insertion.torch_function.registered_optimizers_tracker import (
    FunctionRegisteredOptimizers,
    RegisteredOptimizersTracker,
)
from bitwright.planning import Plan
from bitwright.planning.ops import eager_op_key
from bitwright.program import Program

__all__ = ["call_records"]


def call_records(program: Program, plan: Plan) -> RegisteredOptimizersTracker:
    """Return what an eager plan puts on each function call of a program.

    Calls of functions that quantization knows are recorded whether or not anything of them is simulated, others only
    where a module's boundary spec put a simulator on them.
    """
    records = {id(op): FunctionRegisteredOptimizers() for op in program.ops if eager_op_key(op.type) is not None}
    for site in (site for placement in plan.placements for site in placement.sites):
        record = records.setdefault(id(site.op), FunctionRegisteredOptimizers())
        if site.argument is not None:
            record.input_optimizer_names.append(f"{site.op.call}_quantize_{site.argument.label}")
        else:
            record.output_optimizer_names.append(f"{site.op.call}_quantize_output_{site.output_index}")
    tracker = RegisteredOptimizersTracker()
    for call in program.calls.values():
        for op in call.ops:
            if id(op) in records:
                tracker.register(call.path, op.type, records[id(op)])
    return tracker
