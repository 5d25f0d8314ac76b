"""The commands; each loads what it is given, calls the library, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .loading import Recipe, load_data, load_metric, load_model, load_recipe, recipe_schema
from .output import DAMAGED, CommandError, Output

__all__ = ["compare", "compress", "explain", "inspect", "plan", "schema", "sweep"]

_ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="module:factory, or a .pt2 file.")]
_DataOption = Annotated[str, typer.Option("--data", help="Batches of inputs, as module:iterable.")]
_ConfigOption = Annotated[str, typer.Option("--config", help="Recipe (YAML or JSON), or preset:NAME.")]
_BatchesOption = Annotated[int | None, typer.Option("--batches", min=1, help="Use that many batches at most.")]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the result.")]
_MetricOption = Annotated[str | None, typer.Option("--metric", help="module:function of output and batch.")]
_StrictOption = Annotated[bool, typer.Option("--strict", help="Turn every problem of the plan into an error.")]


def inspect(
    model: _ModelArgument,
    data: _DataOption,
    mode: Annotated[str, typer.Option(help="'graph' or 'eager': the two name ops differently.")] = "graph",
    compressor: Annotated[
        str | None, typer.Option(help="Only ops that 'quantizer', 'palettizer' or 'pruner' knows.")
    ] = None,
    json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Print the ops and modules of a model under the names that recipes match."""
    from bitwright.inspection import ModelInspector
    from bitwright.inspection._batches import inputs_of

    out = Output(json, quiet)
    if mode not in ("graph", "eager"):
        raise CommandError(f"--mode must be 'graph' or 'eager', got {mode!r}.")
    net = load_model(model)
    example = inputs_of(load_data(data, 1)[0], net)
    inspector = ModelInspector(
        net, example.args, mode, _compressor(compressor), example_kwargs=dict(example.kwargs) or None
    )
    ops = inspector.summary.model.all_ops
    out.result(
        lambda: inspector.format_summary(colorize=out.console.is_terminal),
        lambda: {
            "mode": str(inspector.summary.mode),
            "ops": [
                {
                    "name": op.op_name,
                    "type": op.op_type,
                    "modules": [context.module_name for context in op.module_stack],
                }
                for op in ops()
            ],
        },
    )


def plan(
    model: _ModelArgument,
    data: _DataOption,
    config: _ConfigOption,
    strict: _StrictOption = False,
    target: Annotated[str | None, typer.Option(help="Say what this target of 'export' cannot hold, too.")] = None,
    json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Print every decision of a recipe for a model, with all problems; nothing is changed.

    With several techniques in the recipe, each is planned on the float model.
    """
    from bitwright.inspection import plan_config
    from bitwright.inspection._batches import inputs_of

    out = Output(json, quiet)
    net, recipe = load_model(model), load_recipe(config)
    example = inputs_of(load_data(data, 1)[0], net)
    with out.progress() as say:
        say("planning")
        plans = [plan_config(net, one, example) for one in recipe.configs]
        if target is not None:
            _add_problems(plans, target, net, example)
    out.result(
        lambda: "\n\n".join(map(str, plans)),
        lambda: plans[0].to_dict() if len(plans) == 1 else [entry.to_dict() for entry in plans],
    )
    problems = [problem for entry in plans for problem in entry.problems]
    if any(strict or problem.severity == "error" for problem in problems):
        raise typer.Exit(DAMAGED)


def compress(
    model: _ModelArgument,
    data: _DataOption,
    config: _ConfigOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the artifact; must not exist.")],
    batches: _BatchesOption = None,
    strict: _StrictOption = False,
    min_sqnr: Annotated[float | None, typer.Option(help="Smallest SQNR of the output, in dB.")] = None,
    on_damage: Annotated[str, typer.Option(help="'warn', 'raise' or 'revert'.")] = "warn",
    json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Compress a model, check it for damage, and save the packed artifact."""
    from bitwright._utils.files import new_directory_atomically
    from bitwright.inspection import apply_configs, bits_per_weight, guard

    out = Output(json, quiet)
    net, recipe, feed = load_model(model), load_recipe(config), load_data(data, batches)
    if on_damage not in ("warn", "raise", "revert"):
        raise CommandError(f"--on-damage must be 'warn', 'raise' or 'revert', got {on_damage!r}.")
    choice: Any = on_damage
    with new_directory_atomically(output) as folder, out.progress() as say:
        applied = apply_configs(net, recipe.configs, feed, strict=strict, progress=say)
        result = guard(
            net,
            applied.model,
            feed[:4],
            on_damage=choice,
            min_sqnr_db=min_sqnr,
            progress=say,
        )
        say("saving")
        artifact = _artifact(result.model, recipe, applied.plans[-1])
        artifact.save(folder)
    bits = bits_per_weight(result.model)
    report = result.report
    out.result(
        lambda: f"{report.table(limit=10)}\n{bits.bpw:.2f} bits per weight\nsaved in {output}",
        lambda: {
            "output": str(output),
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
            "bits_per_weight": bits.bpw,
            "sqnr_db": None if report.end_to_end.error is None else report.end_to_end.error.sqnr_db,
            "findings": [str(finding) for finding in result.findings],
            "reverted": list(result.reverted),
        },
    )
    if any(finding.code == "BW108" for finding in result.findings) and on_damage == "warn":
        raise typer.Exit(DAMAGED)


def compare(
    model: _ModelArgument,
    data: _DataOption,
    config: Annotated[str | None, typer.Option("--config", help="Recipe or preset to compress with.")] = None,
    artifact: Annotated[Path | None, typer.Option(help="Folder of a packed artifact to compare with.")] = None,
    batches: _BatchesOption = None,
    metric: _MetricOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Layers to print at most.")] = None,
    min_sqnr: Annotated[float | None, typer.Option(help="Exit with 3 below this SQNR of the output, in dB.")] = None,
    json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Compare a compressed model with its float model, layer by layer."""
    from bitwright import inspection

    out = Output(json, quiet)
    if (config is None) == (artifact is None):
        raise CommandError("Give either --config, to compress and compare, or --artifact, to compare with a saved one.")
    net, feed = load_model(model), load_data(data, batches)
    score = None if metric is None else load_metric(metric)
    with out.progress() as say:
        other = _loaded(net, artifact) if artifact is not None else _applied(net, config, feed, say)
        report = inspection.compare(net, other, feed, metric=score, progress=say)
    if html is not None:
        report.to_html(html, title=f"Fidelity of {model}")
        out.say(f"written: {html}")
    out.result(lambda: report.table(limit), report.to_dict)
    error = report.end_to_end.error
    if min_sqnr is not None and (error is None or error.sqnr_db < min_sqnr):
        out.say("BW108 model: the output's SQNR is below the bound (bitwright explain BW108)")
        raise typer.Exit(DAMAGED)


def sweep(
    model: _ModelArgument,
    data: _DataOption,
    config: Annotated[list[str], typer.Option("--config", help="Recipe or preset; give it several times.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for results; an interrupted sweep goes on.")
    ] = None,
    batches: _BatchesOption = None,
    metric: _MetricOption = None,
    json: _JsonOption = False,
    quiet: _QuietOption = False,
) -> None:
    """Measure what each recipe does to each layer alone."""
    from bitwright import inspection

    out = Output(json, quiet)
    net, feed = load_model(model), load_data(data, batches)
    candidates: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in config:
        recipe = load_recipe(name)
        if len(recipe.configs) != 1:
            raise CommandError(f"The recipe {name!r} has several sections; a sweep takes recipes of one technique.")
        other = sources.setdefault(recipe.name, name)
        if other != name:
            raise CommandError(
                f"The recipes {other!r} and {name!r} would both be called {recipe.name!r} in the results; give one of "
                "them another file name."
            )
        candidates[recipe.name] = recipe.configs[0]
    _agree_on_names(config, candidates, out)
    score = None if metric is None else load_metric(metric)
    with out.progress() as say:
        result = inspection.sweep(net, candidates, feed, metric=score, store=output, progress=say)
    out.result(result.table, lambda: result.model_dump(mode="json"))


def explain(
    code: Annotated[str | None, typer.Argument(help="Code of a diagnostic, such as BW101; all if left out.")] = None,
    json: _JsonOption = False,
) -> None:
    """Say what a diagnostic means and what to do."""
    from rich.markdown import Markdown

    from bitwright.inspection import diagnostics
    from bitwright.inspection import explain as look_up

    out = Output(json)
    if code is None:
        found = diagnostics()
        out.result(
            lambda: "\n".join(f"{entry.code}  {entry.title}" for entry in found.values()),
            lambda: {entry.code: entry.title for entry in found.values()},
        )
        return
    try:
        diagnostic = look_up(code)
    except KeyError as error:
        raise CommandError(str(error.args[0])) from error
    if out.console.is_terminal and not json:
        out.console.print(Markdown(diagnostic.page))
        return
    out.result(
        lambda: diagnostic.page,
        lambda: {"code": diagnostic.code, "title": diagnostic.title, "page": diagnostic.page},
    )


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; stdout if left out.")] = None,
) -> None:
    """Write the JSON schema of recipes, from which editors complete and check."""
    import json

    from bitwright._utils.files import write_text_atomically

    text = json.dumps(recipe_schema(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text_atomically(output, text)


def _add_problems(plans: list[Any], target: str, net: Any, example: Any) -> None:
    from bitwright.export.capabilities import check_plan
    from bitwright.export.operators import check_operators
    from bitwright.export.targets import TARGETS

    if target not in TARGETS:
        raise CommandError(f"There is no target {target!r}; there are {', '.join(TARGETS)}.")
    for entry in plans:
        entry.problems.extend(check_plan(entry, target))
    plans[0].problems.extend(check_operators(net, target, example.args, example.kwargs))


def _agree_on_names(names: list[str], candidates: dict[str, Any], out: Output) -> None:
    """Let presets follow the other candidates into eager mode: the two modes name layers differently."""
    modes = {name: str(getattr(one, "execution_mode", "eager")) for name, one in candidates.items()}
    presets = [name.removeprefix("preset:") for name in names if name.startswith("preset:")]
    if set(modes.values()) != {"eager", "graph"}:
        return
    for name in presets:
        if modes[name] == "graph":
            candidates[name].execution_mode = modes[name] = "eager"
    graphs = [name for name, mode in modes.items() if mode == "graph"]
    if graphs:
        out.say(
            f"note: {', '.join(graphs)} name layers as graph mode does, the other recipes as eager mode does; with "
            "'execution_mode: eager' in all of them, each layer has one row."
        )


def _compressor(name: str | None) -> Any:
    from bitwright.palettization import KMeansPalettizer
    from bitwright.pruning import MagnitudePruner
    from bitwright.quantization import Quantizer

    known = {None: None, "quantizer": Quantizer, "palettizer": KMeansPalettizer, "pruner": MagnitudePruner}
    if name not in known:
        raise CommandError(f"There is no compressor {name!r}; there are 'quantizer', 'palettizer' and 'pruner'.")
    return known[name]


def _applied(net: Any, config: str | None, feed: list[Any], say: Any) -> Any:
    from bitwright.inspection import apply_configs

    assert config is not None
    return apply_configs(net, load_recipe(config).configs, feed, progress=say).model


def _loaded(net: Any, folder: Path) -> Any:
    import copy

    from bitwright.artifact import Artifact

    return Artifact.load(folder).packed_model(copy.deepcopy(net))


def _artifact(model: Any, recipe: Recipe, plan: Any) -> Any:
    from bitwright.inspection import artifact_of

    configs = [config.to_json(indent=None) for config in recipe.configs]
    return artifact_of(model, config=configs, plan=plan)
