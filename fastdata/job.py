"""The ranks that measure together under torchrun: one process a rank plans alike, and rank 0 gets all figures."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from typing import Any

from fastdata.errors import UsageError
from fastdata.fresh import MeasureCancelled, MeasureError, run_fresh
from fastdata.task import Task

_STORE_TIMEOUT = datetime.timedelta(hours=1)


class Job:
    """A single process."""

    rank = 0
    world_size = 1
    local_rank = 0

    def measure(self, task: Task, name: str) -> list[dict[str, Any]]:  # noqa: ARG002 - ranks need it
        """Measure a task in fresh processes and return the figures of every rank.

        Args:
            task: What to measure.
            name: Unique in this job, the same on every rank.

        Raises:
            MeasureError: A rank failed; the message names it.
        """
        return [run_fresh(task)]

    def close(self) -> None:
        """Leave the job."""


class TorchrunJob(Job):
    """This process as one rank of a job; the ranks meet in torchrun's store."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Connect to the store.

        Args:
            environment: torchrun's variables.
        """
        import torch.distributed as dist

        self.rank = int(environment["RANK"])
        self.world_size = int(environment["WORLD_SIZE"])
        self.local_rank = int(environment.get("LOCAL_RANK", self.rank))
        self._host, self._port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        # torchrun's agent usually serves the store already; otherwise rank 0 does.
        serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self.rank == 0
        self._prefix = f"fastdata-bench/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(
            self._prefix,
            dist.TCPStore(self._host, self._port, is_master=serves, wait_for_workers=False, timeout=_STORE_TIMEOUT),
        )

    def measure(self, task: Task, name: str) -> list[dict[str, Any]]:
        """Measure on this rank, exchange figures, and return those of every rank."""
        task = dataclasses.replace(
            task,
            rank=self.rank,
            world_size=self.world_size,
            rendezvous=(self._host, self._port, f"{self._prefix}/{name}/group"),
        )
        failed = f"{name}/failed"
        try:
            answer: dict[str, Any] = {"figures": run_fresh(task, cancelled=lambda: self._store.check([failed]))}
        except MeasureCancelled:
            answer = {}
        except MeasureError as exc:
            self._store.set(failed, "1")
            answer = {"error": exc.found}
        self._store.set(f"{name}/{self.rank}", json.dumps(answer))
        answers = [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.world_size)]
        errors = [f"rank {rank}: {found['error']}" for rank, found in enumerate(answers) if "error" in found]
        if errors:
            raise MeasureError(f"{task.backend} on {task.data}", "\n".join(errors))
        return [found["figures"] for found in answers]

    def close(self) -> None:
        """Wait for all ranks, so that rank 0 does not take the store away from the others."""
        self._store.set(f"closed/{self.rank}", "1")
        self._store.wait([f"closed/{rank}" for rank in range(self.world_size)], _STORE_TIMEOUT)


def join_job(environment: dict[str, str] | None = None) -> Job:
    """Return the job of torchrun's variables, or a single process where there are none.

    Args:
        environment: The variables; None is this process's.

    Raises:
        UsageError: Some of the variables are missing.
    """
    variables = dict(os.environ) if environment is None else environment
    if int(variables.get("WORLD_SIZE", "1")) == 1:
        return Job()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise UsageError(
            "WORLD_SIZE", "set without " + ", ".join(missing), "all of torchrun's variables", "Start with torchrun."
        )
    return TorchrunJob(variables)
