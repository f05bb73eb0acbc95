"""Runs one measurement in a process of its own, and ends that process with all its children whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdata.errors import FastDataError
from fastdata.task import Task

POLL_S = 0.05
STARTUP_S = 600.0
"""Seconds a measurement may take besides its warm-up and window: imports, indexing, compiling, slow first batches."""


class MeasureError(FastDataError):
    """A measurement that failed. `subject` names the row, `found` holds what its process said."""


class MeasureCancelled(MeasureError):
    """A measurement that was ended from outside: it did not fail itself."""


def run_fresh(
    task: Task, *, timeout_s: float | None = None, cancelled: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Measure a task in a fresh process and return its figures.

    Args:
        task: What to measure.
        timeout_s: Seconds after which the process is ended; None: ten times the window and `STARTUP_S`.
        cancelled: Polled while the process runs; True ends it (another rank failed).

    Raises:
        MeasureError: The process failed, died or took too long.
        MeasureCancelled: `cancelled` said so.
    """
    limit_s = 10 * (task.seconds + task.warmup_s) + STARTUP_S if timeout_s is None else timeout_s
    name = f"{task.backend} on {task.data}, {task.mode}"
    with tempfile.TemporaryDirectory(prefix="fastdata-bench-") as folder:
        asked, answer, said = Path(folder, "task.json"), Path(folder, "figures.json"), Path(folder, "output.txt")
        asked.write_text(json.dumps(asdict(task)))
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fastdata.measure", str(asked), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            _wait(process, name, limit_s, cancelled)
        result = json.loads(answer.read_text()) if answer.exists() else {}
        if "figures" in result:
            figures: dict[str, Any] = result["figures"]
            return figures
        found = result.get("error") or f"its process ended with code {process.returncode}: {_tail(said)}"
        raise MeasureError(name, found)


def _wait(process: subprocess.Popen[bytes], name: str, limit_s: float, cancelled: Callable[[], bool]) -> None:
    """Wait until the process ends, and end its group in any case."""
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise MeasureError(name, f"no result within {limit_s:.0f} s")
            if cancelled():
                raise MeasureCancelled(name, "ended because another rank failed")
            time.sleep(POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the usual case: nothing is left of the group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(output: Path, characters: int = 1500) -> str:
    text = output.read_text(errors="replace").strip()
    return text[-characters:] or "it said nothing"
