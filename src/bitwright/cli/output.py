"""What commands print, and how errors become exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer

__all__ = ["DAMAGED", "FAILED", "INTERRUPTED", "USAGE", "CommandError", "Output", "reporting_errors"]

FAILED = 1
"""Exit code: the command could not do its work."""

USAGE = 2
"""Exit code: the command line is wrong."""

DAMAGED = 3
"""Exit code: the work is done, but a bound that was asked for is not held."""

INTERRUPTED = 130
"""Exit code: Ctrl-C."""


class CommandError(Exception):
    """The command line names something that is not there or not usable; the message says what to write."""


class Output:
    """Prints results to stdout, and everything else to stderr.

    Args:
        as_json: results are JSON.
        quiet: nothing but results is printed.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        from rich.console import Console

        self.as_json = as_json
        self.quiet = quiet
        self.console = Console(highlight=False, soft_wrap=True)
        self.messages = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)

    def result(self, text: Callable[[], str], document: Callable[[], Any]) -> None:
        """Print a result: as text, or as JSON if that was asked for."""
        shown = json.dumps(document(), indent=2, allow_nan=False) if self.as_json else text()
        sys.stdout.write(shown.rstrip("\n") + "\n")

    def say(self, text: str) -> None:
        """Print a message, unless ``--quiet``."""
        self.messages.print(text, markup=False)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """Show what is being done while the block runs, where stderr is a terminal."""
        if self.quiet or not self.messages.is_terminal:
            yield lambda _: None
            return
        from rich.markup import escape

        with self.messages.status("starting") as status:
            yield lambda text: status.update(escape(text))


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn exceptions into one message and an exit code; with ``BITWRIGHT_TRACEBACK=1`` they come through."""

    def fail(message: str, code: int) -> typer.Exit:
        sys.stderr.write(f"error: {message}\n")
        return typer.Exit(code)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            yield
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise fail("interrupted; files are as they were, or whole.", INTERRUPTED) from None
        except CommandError as error:
            if error.__cause__ is not None and os.environ.get("BITWRIGHT_TRACEBACK"):
                raise
            raise fail(str(error), USAGE) from None
        except Exception as error:
            if os.environ.get("BITWRIGHT_TRACEBACK"):
                raise
            message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            hint = "" if type(error).__module__.startswith("bitwright") else f" ({type(error).__name__})"
            raise fail(f"{message}{hint}", FAILED) from error


def _show_warning(message: Any, category: type[Warning], *_: Any) -> None:
    if category.__module__.startswith("bitwright"):
        sys.stderr.write(f"warning: {message}\n")
