"""Files that a command writes at its end: refused at its start where they cannot be written, and never half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fastdata.errors import UsageError


def refuse_unwritable(*paths: Path | None) -> None:
    """Refuse paths that `write_whole` could not write, before hours are spent on what they shall hold.

    Only trying tells: a file without a name is made in the folder, and is gone at once. None stands for no file.

    Raises:
        UsageError: A path is a folder, its folder does not exist, or nothing can be written there; names it.
    """
    for path in paths:
        if path is None:
            continue
        expected = "a file in a folder that can be written to"
        folder = path.absolute().parent
        try:
            if not folder.is_dir():
                raise UsageError(str(path), "its folder does not exist", "a path in an existing folder")
            if path.is_dir():
                raise UsageError(str(path), "a folder", "a file")
            if not _is_written_in_place(path):
                tempfile.TemporaryFile(dir=folder).close()
            elif path.exists() and not os.access(path, os.W_OK):
                raise UsageError(str(path), "no permission to write to it", expected)
        except OSError as exc:
            raise UsageError(str(path), f"cannot be written: {exc.strerror or exc}", expected) from exc


def write_whole(path: Path, text: str) -> None:
    """Write a text file (UTF-8) that appears whole or not at all."""
    if _is_written_in_place(path):
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _is_written_in_place(path: Path) -> bool:
    # A rename onto /dev/stdout, /dev/null or a pipe would replace the device instead of writing to it.
    return path.is_symlink() or (path.exists() and not path.is_file())
