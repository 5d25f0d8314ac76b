"""The inspector's tree as text."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from .types import BoundaryEdge, InputEdge, ModelSummary, ModuleInfo, OpInfo

__all__ = ["format_summary"]

_WIDTH = 240
_LEGEND = """Legend:
  ■ module_name (module_type)  ◆ op_name [op_type]
  op inputs:  {key: source[output]}    key of op_input_spec, and where the tensor comes from
  op states:  names                    parameters and buffers, as op_state_spec matches them
  op outputs: {key: [readers]}         key of op_output_spec, and who reads the tensor
  module inputs, module outputs        keys of module_input_spec and module_output_spec; absent keys are not quantizable
  untracked_N                          a tensor from outside the model; op_input_spec reaches it
"""


def format_summary(summary: ModelSummary, colorize: bool | None = None) -> str:
    """Return legend and tree; a note where no op was found."""
    if not summary.model.all_ops():
        return "(no compressible operations found)"
    buffer = io.StringIO()
    console = Console(file=buffer, width=_WIDTH, force_terminal=colorize, no_color=colorize is False, highlight=False)
    tree = Tree(_module_label(summary.model))
    _add(tree, summary.model)
    console.print(Text(_LEGEND))
    console.print(tree)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _add(branch: Tree, module: ModuleInfo) -> None:
    """Add ops and children in order of execution."""
    entries: list[tuple[int, OpInfo | ModuleInfo]] = [(op.order, op) for op in module.ops]
    entries += [(min((op.order for op in child.all_ops()), default=0), child) for child in module.children()]
    for _, entry in sorted(entries, key=lambda pair: pair[0]):
        if isinstance(entry, ModuleInfo):
            _add(branch.add(_module_label(entry)), entry)
        else:
            branch.add(_op_label(entry))


def _module_label(module: ModuleInfo) -> Text:
    label = Text()
    if module.module_name:
        label.append("■ ", "blue").append(module.module_name, "bold blue").append(" ")
    label.append(f"({module.module_type})", "dim" if module.module_name else "bold")
    lines = {
        "module inputs: ": _mapping(
            (key, "[" + ", ".join(map(_boundary, edges)) + "]") for key, edges in module.input_ops.items()
        ),
        "module outputs:": _mapping((key, _boundary(edge)) for key, edge in module.output_ops.items()),
    }
    return _with_lines(label, lines)


def _op_label(op: OpInfo) -> Text:
    label = Text().append("◆ ", "green").append(op.op_name, "bold green").append(f" [{op.op_type}]", "cyan")
    lines = {
        "op inputs: ": _mapping((edge.index, _source(edge)) for edge in op.inputs if not edge.is_state),
        "op states: ": ", ".join(edge._display_name for edge in op.inputs if edge.is_state),
        "op outputs:": _mapping(
            (key, "[" + ", ".join(reader.op_name for reader in readers) + "]") for key, readers in op.outputs.items()
        ),
    }
    if op.source_frames:
        frame = op.source_frames[-1]
        own = [f for f in op.source_frames if f"{os.sep}torch{os.sep}nn{os.sep}" not in f.filename]
        frame = own[-1] if own else frame
        lines["source:    "] = f"{os.path.basename(frame.filename)}:{frame.lineno}  {frame.code_context}"
    return _with_lines(label, lines)


def _with_lines(label: Text, lines: Mapping[str, str]) -> Text:
    for name, content in lines.items():
        if content and content != "{}":
            label.append(f"\n  {name} ", "dim").append(content)
    return label


def _mapping(entries: Iterable[tuple[int, str]]) -> str:
    return "{" + ", ".join(f"{key}: {text}" for key, text in entries) + "}"


def _boundary(edge: BoundaryEdge) -> str:
    return f"{edge.op.op_name}[{edge.index}]"


def _source(edge: InputEdge) -> str:
    return edge.op_name if edge.output_idx is None else f"{edge.op_name}[{edge.output_idx}]"
