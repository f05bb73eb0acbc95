"""Labels from anywhere but class folders: a CSV file or a callable, turned into one array."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import FastDataError, SourceError
from fastdata.sources.paths import PathTable, is_image_name, printable, to_bytes, to_text

LabelArray = NDArray[np.int64] | NDArray[np.float32]
_INT64 = np.iinfo(np.int64)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def labels_from_csv(csv_path: Path, paths: PathTable) -> tuple[NDArray[np.int64], LabelArray, tuple[str, ...]]:
    """Read a CSV file of ``path,label[,label...]``: comma-separated UTF-8, paths relative to the folder, with ``/``.

    The first row is taken for a heading where its first cell does not end like a picture. Only pictures that the file
    names become samples; white space around a path belongs to it only where a picture is named so. See
    `as_label_array` for what the label cells may hold.

    Args:
        csv_path: The file.
        paths: Relative paths of all pictures in the folder.

    Returns:
        (n,) int64 ascending places in `paths` of the pictures that have a row, their labels, and the class names.

    Raises:
        SourceError: The file is missing or empty, or a row names no picture, names one twice or has bad labels; the
            message has the row's line.
    """
    places = {path: place for place, path in enumerate(paths)}
    chosen: list[int] = []
    cells: list[list[str]] = []
    lines: list[int] = []
    try:
        with open(csv_path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            for number, row in enumerate(reader):
                if not row or (number == 0 and not is_image_name(to_bytes(row[0].strip()))):
                    continue
                name = to_bytes(row[0].strip().removeprefix("./"))
                place = places.get(to_bytes(row[0].removeprefix("./")), places.get(name))
                if place is None:
                    raise _csv_error(csv_path, reader.line_num, f"{printable(name)!r}, which is no picture there")
                chosen.append(place)
                cells.append([cell.strip() for cell in row[1:]])
                lines.append(reader.line_num)
    except (OSError, csv.Error) as exc:
        raise SourceError(str(csv_path), str(exc), "a readable CSV file of path,label[,label...]") from exc
    if not chosen:
        raise SourceError(str(csv_path), "no row that names a picture", "rows of path,label[,label...]")
    width = max(map(len, cells))
    for row_cells, line in zip(cells, lines, strict=True):
        if len(row_cells) != width or not all(row_cells):
            raise _csv_error(csv_path, line, f"{sum(map(bool, row_cells))} labels", f"{max(width, 1)} as in other rows")
    order = np.argsort(np.asarray(chosen, np.int64), kind="stable")
    positions = np.asarray(chosen, np.int64)[order]
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    if twice.size:
        raise _csv_error(
            csv_path, lines[order[twice[0] + 1]], f"{printable(paths[positions[twice[0]]])!r} a second time", "one row"
        )
    sorted_cells = [cells[i] for i in order]
    labels, classes = as_label_array(
        [row[0] if width == 1 else row for row in sorted_cells],
        lambda i, found, expected: _csv_error(csv_path, lines[order[i]], found, expected),
    )
    return positions, labels, classes


def labels_from_callable(
    function: Callable[[str], Any], full_paths: Sequence[str] | Any
) -> tuple[LabelArray, tuple[str, ...]]:
    """Call a function on the full path of each picture; see `as_label_array` for what it may return.

    Raises:
        SourceError: The function fails, or returns something else; the message names the picture.
    """
    values: list[Any] = []
    paths: list[str] = []
    for path in full_paths:
        try:
            value = function(path)
        except FastDataError:
            raise
        except Exception as exc:
            raise SourceError(path, f"labels= raised {type(exc).__name__}: {exc}", "a label for this picture") from exc
        values.append(value)
        paths.append(path)
    return as_label_array(
        values, lambda i, found, expected: SourceError(paths[i], f"labels= returned {found}", expected)
    )


def as_label_array(
    values: Sequence[Any], error: Callable[[int, str, str], SourceError]
) -> tuple[LabelArray, tuple[str, ...]]:
    """Turn one value a sample into labels.

    Args:
        values: All int: class indices. All numbers: regression. All text that is no number: class names. All sequences
            of numbers of one length: multi-hot or regression. Numbers may be given as text.
        error: Makes the error for (place in `values`, what was found, what was expected).

    Returns:
        (n,) int64, or (n, k) float32 for sequences and for numbers that are not all int; and the class names, sorted
        as text, where values were text.
    """
    if _is_sequence(values[0]):
        return _as_rows(values, error), ()
    parsed: list[Any] = [_parse(value) for value in values]
    kinds = {type(value) for value in parsed}
    if kinds == {int}:
        for i, value in enumerate(parsed):
            if not _INT64.min <= value <= _INT64.max:
                raise error(i, repr(values[i]), "a whole number of 64 bits")
        return np.asarray(parsed, np.int64), ()
    if kinds == {str}:
        classes = sorted(set(parsed))
        index = {name: number for number, name in enumerate(classes)}
        return np.asarray([index[name] for name in parsed], np.int64), tuple(classes)
    textual = isinstance(parsed[0], str)
    for i, value in enumerate(parsed):
        if value is None or isinstance(value, str) != textual:
            raise error(
                i, repr(values[i]), "a label of the same kind as the first: numbers, text or sequences of numbers"
            )
        if not textual and not _fits_float32(value):
            raise error(i, repr(values[i]), "a finite number (float32)")
    return np.asarray(parsed, np.float32)[:, None], ()


def _as_rows(values: Sequence[Any], error: Callable[[int, str, str], SourceError]) -> NDArray[np.float32]:
    width = len(values[0])
    rows = np.empty((len(values), width), np.float32)
    for i, value in enumerate(values):
        if not _is_sequence(value) or len(value) != width or width == 0:
            raise error(i, repr(value), f"a sequence of {max(width, 1)} numbers, as for the first picture")
        numbers = [_parse(item) for item in value]
        if any(isinstance(number, str) or number is None or not _fits_float32(number) for number in numbers):
            raise error(i, repr(value), f"{width} finite numbers (float32)")
        rows[i] = numbers
    return rows


def _parse(value: Any) -> int | float | str | None:
    """Return a number where the value is one or spells one, text where it is other text, else None."""
    if isinstance(value, str):
        try:
            if value.isascii() and value.lstrip("+-").isdigit():
                return int(value)
            return float(value) if "_" not in value else value
        except ValueError:
            return value
    if isinstance(value, bool | int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    return int(value) if getattr(value, "ndim", None) == 0 and not value.is_floating_point() else None


def _fits_float32(value: float) -> bool:
    return abs(value) <= _FLOAT32_MAX  # false for nan; an int of any length compares without overflow


def _is_sequence(value: Any) -> bool:
    return not isinstance(value, str | bytes) and hasattr(value, "__len__") and getattr(value, "ndim", 1) == 1


def _csv_error(path: Path, line: int, found: str, expected: str = "") -> SourceError:
    return SourceError(f"{path} line {line}", found, expected)


def text_paths(root: bytes, paths: PathTable) -> Any:
    """Yield the full path of each picture as text."""
    prefix = to_text(root) + "/"
    for path in paths:
        yield prefix + to_text(path)
