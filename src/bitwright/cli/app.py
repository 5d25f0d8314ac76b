"""The command line's app: its commands and the entry point."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bitwright._about import __version__

from .commands import compare, compress, explain, inspect, plan, schema, sweep
from .demo import demo
from .exporting import export
from .output import reporting_errors

__all__ = ["app", "main"]

app = typer.Typer(
    help="Make PyTorch models small and fast in few bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bitwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Make PyTorch models small and fast in few bits."""


def _add(function: Callable[..., Any]) -> None:
    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        with reporting_errors():
            return function(*args, **kwargs)

    app.command(name=function.__name__)(command)


for _command in (demo, inspect, plan, compress, compare, sweep, export, explain, schema):
    _add(_command)


def main() -> None:
    """Run the command line."""
    app()
