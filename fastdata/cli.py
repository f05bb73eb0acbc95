"""The command line: collects the commands and turns errors into one message and an exit code."""

from __future__ import annotations

import importlib
import sys

import typer
from rich.console import Console

from fastdata.errors import FastDataError, UsageError

COMMAND_MODULES = ("fastdata.commands.bench", "fastdata.commands.shards")
"""Modules with a ``register(app)``; their imports must be light, because every command pays for them."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def make_app() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        name="fastdata",
        help="Keeps GPUs fed with images: convert, check and measure.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    @app.callback()
    def fastdata() -> None:
        """Keeps GPUs fed with images: convert, check and measure."""

    for module in COMMAND_MODULES:
        importlib.import_module(module).register(app)
    return app


def main() -> None:
    """Run the command line; errors of the package become one message and a code that is not 0."""
    try:
        make_app()(prog_name="fastdata")
    except FastDataError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
