"""The command line's app: its commands and the entry point."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from .commands import compare, compress, explain, export, inspect, plan, schema, sweep
from .demo import demo
from .output import reporting_errors

__all__ = ["app", "main"]

app = typer.Typer(
    help="Make PyTorch models small and fast in few bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
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
