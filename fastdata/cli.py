"""The command line: collects the commands and turns errors into one message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

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
    def fastdata(
        version: Annotated[  # printed by its callback
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Keeps GPUs fed with images: convert, check and measure."""

    for module in COMMAND_MODULES:
        importlib.import_module(module).register(app)
    return app


def main() -> None:
    """Run the command line; errors of the package and of the system become one line and a code that is not 0.

    Other errors are ours: they keep their traceback.
    """
    try:
        make_app()(prog_name="fastdata")
    except FastDataError as error:
        _show_error(str(error))
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    except OSError as error:  # a full disk, a lost mount, a missing permission: no fault of the code
        paths = " and ".join(_path_text(path) for path in (error.filename, error.filename2) if path is not None)
        reason = error.strerror or str(error) or type(error).__name__
        _show_error(f"{paths}: {reason}" if paths else reason)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _show_version(asked: bool) -> None:
    if asked:
        from fastdata import __version__

        typer.echo(f"fastdata {__version__}")
        raise typer.Exit


def _path_text(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, bytes) else str(path)


def _show_error(text: str) -> None:
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
