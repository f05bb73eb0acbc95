"""How long loading holds the interpreter, so that no other thread of the process can run Python code."""

from __future__ import annotations

from time import perf_counter


class Meter:
    """Sums the time of the calling thread between `hold` and `release`. One object for one thread and one use.

    `hold` is called when a call that released the interpreter has come back, thus has it again, and `release` before
    the next such call, so the wall clock between them tells how long the interpreter was kept, whatever else runs. (A
    thread that Python interrupts in between, after 5 ms, counts the others' turn as well.)
    """

    __slots__ = ("_since", "held_s")

    def __init__(self) -> None:
        """Start holding."""
        self.held_s = 0.0
        self._since = perf_counter()

    def release(self) -> None:
        """Call before a call that works without the interpreter."""
        self.held_s += perf_counter() - self._since

    def hold(self) -> None:
        """Call after it."""
        self._since = perf_counter()
