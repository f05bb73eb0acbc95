"""What the ranks of a measured job agree on; a single process agrees with itself."""

from __future__ import annotations

import datetime
from typing import Any

TIMEOUT = datetime.timedelta(minutes=5)
"""Longest wait of one rank for the others."""


class Ranks:
    """A process group for agreements (gloo, on the CPU) and for gradients (NCCL where tensors are on GPUs)."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Keep the numbers; `join` makes the group."""
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def join(cls, rendezvous: tuple[str, int, str] | None, rank: int, world_size: int) -> Ranks:
        """Join the group of a job.

        Args:
            rendezvous: (host, port, key prefix) of a running store; the prefix separates one measurement from the next.
                None where there is one rank.
            rank: This rank.
            world_size: Number of ranks.
        """
        if rendezvous is not None:
            import torch
            import torch.distributed as dist

            host, port, prefix = rendezvous
            store = dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=dist.PrefixStore(prefix, store),
                rank=rank,
                world_size=world_size,
                timeout=TIMEOUT,
            )
        return cls(rank, world_size)

    def __enter__(self) -> Ranks:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def all_true(self, flag: bool) -> bool:
        """Return whether the flag is true on every rank. Every rank must call it."""
        return self._reduced(float(flag), "MIN") > 0

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks. Every rank must call it."""
        return self._reduced(value, "MAX")

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._reduced(0.0, "MAX")

    def _reduced(self, value: float, operation: str) -> float:
        if self.world_size == 1:
            return value
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], dtype=torch.float64)  # on the CPU, so that it goes through gloo
        reduce_op: Any = getattr(dist.ReduceOp, operation)
        dist.all_reduce(tensor, op=reduce_op)
        return float(tensor)
