"""``bitwright export``: a model, compressed and written for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright._utils.files import new_file_atomically
from bitwright.errors import PlanError

from .loading import Recipe, load_data, load_model, load_recipe
from .output import CommandError, Output

__all__ = ["export"]

_BY_SUFFIX = {".onnx": "onnx", ".aimodel": "coreai", ".mlpackage": "coreml", ".pte": "executorch", ".gguf": "gguf"}


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="module:factory, or a .pt2 file.")],
    data: Annotated[str, typer.Option("--data", help="Batches of inputs, as module:iterable.")],
    config: Annotated[str, typer.Option("--config", help="Recipe (YAML or JSON), or preset:NAME.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="What to write: .onnx, .pte, .gguf, .aimodel, .mlpackage, .pt2, ...")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="'artifact', 'torch', 'aot-inductor', 'onnx', 'onnx-nbits', 'coreai', 'coreml', 'executorch', "
            "'compressed-tensors' or 'gguf'; by default what the ending of the output says."
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Without a target, for .pt2: finalize for 'coreai' (default), 'coreml' or '_torch'."),
    ] = None,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Leave the first dimension of every input free.")
    ] = False,
    batches: Annotated[int | None, typer.Option("--batches", min=1, help="Use that many batches at most.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the result.")] = False,
) -> None:
    """Compress a model and write it for a target, as the ending of the output or --target says.

    A .pt2 file without --target is the finalized model as an exported program.
    """
    out = Output(quiet=quiet)
    chosen = _target(target, backend, output)
    if chosen is None:
        _export_finalized(out, model, data, config, output, backend or "coreai", dynamic_batch, batches)
        return
    from bitwright.export.targets import TARGETS
    from bitwright.inspection import apply_configs
    from bitwright.inspection._batches import inputs_of

    to = TARGETS[chosen]
    missing = to.missing()
    if missing is not None:
        raise CommandError(f"The target {chosen!r} is not installed: {missing}")
    if dynamic_batch and not to.keeps_shapes:
        raise CommandError(f"The target {chosen!r} fixes the largest shapes of its inputs; leave --dynamic-batch out.")
    net, recipe, feed = load_model(model), load_recipe(config), load_data(data, batches)
    example = inputs_of(feed[0], net)
    shapes = _free_first(example) if dynamic_batch else None
    with out.progress() as say:
        say("planning")
        _refuse_early(net, recipe, example, chosen)
        prepared = apply_configs(net, recipe.configs, feed, progress=say).model
        say(f"writing: {to.title}")
        _write_atomically(
            output, lambda path: to.write(prepared.eval(), example.args, path, dict(example.kwargs), shapes)
        )
    out.say(f"saved: {output}")


def _target(target: str | None, backend: str | None, output: Path) -> str | None:
    """The name of the target, None for a finalized program."""
    from bitwright.common import ExportBackend
    from bitwright.export.targets import TARGETS

    if backend is not None and backend not in {member.value for member in ExportBackend}:
        raise CommandError(
            f"There is no backend {backend!r}; there are {', '.join(repr(member.value) for member in ExportBackend)}."
        )
    if target is None:
        chosen = _BY_SUFFIX.get(output.suffix)
        if chosen is None and output.suffix != ".pt2":
            raise CommandError(
                f"The ending of {str(output)!r} does not say what to write; end it in "
                f"{', '.join([*_BY_SUFFIX, '.pt2'])}, or give --target."
            )
        if chosen is not None and backend not in (None, chosen):
            needed = f"--backend {chosen}" if chosen in ("coreai", "coreml") else "no --backend"
            raise CommandError(f"A {output.suffix} needs {needed}, not {backend!r}; write a .pt2 file for that.")
        return chosen
    if target not in TARGETS:
        raise CommandError(f"There is no target {target!r}; there are {', '.join(TARGETS)}.")
    if backend is not None:
        raise CommandError("Give either --target or --backend.")
    suffix = TARGETS[target].suffix
    if suffix and output.suffix != suffix:
        raise CommandError(f"The target {target!r} writes {suffix}; call the output {output.with_suffix(suffix)}.")
    return target


def _refuse_early(net: Any, recipe: Recipe, example: Any, target: str) -> None:
    """Say what the target cannot hold before anything is calibrated; weights of several techniques fail at the end."""
    from bitwright.export.capabilities import check_plan
    from bitwright.export.operators import check_operators
    from bitwright.inspection import plan_config
    from bitwright.planning import Severity

    operators = check_operators(net, target, example.args, example.kwargs)
    if operators:
        listed = "\n".join(f"  {problem}" for problem in operators)
        raise PlanError(f"{target} cannot hold {len(operators)} operator(s) of this model:\n{listed}", tuple(operators))
    if len(recipe.configs) != 1:
        return
    plan = plan_config(net, recipe.configs[0], example)
    refused = [problem for problem in check_plan(plan, target) if problem.severity == Severity.ERROR]
    if refused:
        listed = "\n".join(f"  {problem}" for problem in refused)
        raise PlanError(f"{target} cannot hold {len(refused)} tensor(s) of this plan:\n{listed}", tuple(refused))


def _free_first(example: Any) -> Any:
    """Return dynamic shapes that leave the first dimension of every tensor free, those in containers too."""
    import torch
    from torch.utils._pytree import tree_map

    def free(value: Any) -> Any:
        return {0: torch.export.Dim.DYNAMIC} if isinstance(value, torch.Tensor) and value.ndim else None

    if not example.kwargs:
        return tree_map(free, tuple(example.args))
    raise CommandError("--dynamic-batch takes models with positional inputs only.")


def _write_atomically(output: Path, write: Any) -> None:
    """Write a file or a folder beside ``output``, then put it in its place."""
    if output.is_dir():
        if any(output.iterdir()):
            raise FileExistsError(f"{str(output)!r} exists already; give a path that is free.")
        output.rmdir()
    with new_file_atomically(output) as part:
        write(Path(part))


def _export_finalized(
    out: Output,
    model: str,
    data: str,
    config: str,
    output: Path,
    backend: str,
    dynamic_batch: bool,
    batches: int | None,
) -> None:
    import torch

    from bitwright.inspection import apply_configs
    from bitwright.inspection._batches import inputs_of
    from bitwright.program.exporting import exported

    net, recipe, feed = load_model(model), load_recipe(config), load_data(data, batches)
    example = inputs_of(feed[0], net)
    shapes = _free_first(example) if dynamic_batch else None
    with out.progress() as say:
        finalized = apply_configs(net, recipe.configs, feed, progress=say).finalize(backend)
        say("exporting")
        with torch.no_grad():
            program = exported(finalized.eval(), example.args, dict(example.kwargs), dynamic_shapes=shapes)
        _save_program(program, output)
    out.say(f"saved: {output}")


def _save_program(program: Any, path: Path) -> None:
    from torch._export.serde.serialize import SerializeError

    from bitwright.export.torch_program import save_program

    try:
        save_program(program, path)
    except SerializeError as error:
        raise CommandError(
            "torch.export cannot write activations as Core ML takes them to a .pt2 file; write a .mlpackage, which "
            'needs pip install "bitwright[coreml]".'
        ) from error
