"""Progress of long work: bars and counters on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHOW_AFTER_S = 0.5  # shorter work finishes before a bar helps anyone


@contextmanager
def counter(text: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how many `unit` of a total not known beforehand are done.

    Yields:
        A function that takes the number done since its last call.
    """
    with Bar(text, None, unit) as bar:
        yield bar.advance


class Bar:
    """One progress bar on standard error, shown on a terminal and once work takes longer than half a second.

    Not thread-safe: call it from one thread.
    """

    def __init__(self, text: str, total: int | None, unit: str) -> None:
        """Prepare the bar.

        Args:
            text: What is being done.
            total: Number of units of the whole work; None where it is not known.
            unit: What is counted, for example "images".
        """
        self._text, self._total, self._unit = text, total, unit
        self._started_s = time.monotonic()
        self._done, self._bytes = 0, 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._enabled = sys.stderr is not None and sys.stderr.isatty()

    def advance(self, units: int, size_bytes: int = 0) -> None:
        """Count finished units, and the bytes they held."""
        self._done += units
        self._bytes += size_bytes
        if not self._enabled:
            return
        elapsed_s = time.monotonic() - self._started_s
        if self._progress is None:
            if elapsed_s < _SHOW_AFTER_S:
                return
            self._start()
        assert self._progress is not None
        assert self._task is not None
        rate = f"{self._done / elapsed_s:,.0f} {self._unit}/s"
        if self._bytes:
            rate += f"  {self._bytes / elapsed_s / 1e6:,.0f} MB/s"
        self._progress.update(self._task, completed=self._done, rate=rate)

    def _start(self) -> None:
        from rich.console import Console  # here, since most work is over before a bar is needed
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        ]
        if self._total is not None:
            columns += [TimeRemainingColumn(), TextColumn("left")]
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(self._text, total=self._total, rate="")
        self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
