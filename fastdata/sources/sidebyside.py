"""Several slow iterators, read in threads at a time and merged in an order that does not depend on their speed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_WAITING_BYTES = 4 << 20  # of each reader
_WAIT_FOR_THREAD_S = 5.0


class Stoppable(Protocol[T_co]):
    """An iterable whose waiting can be ended from another thread."""

    def __iter__(self) -> Iterator[T_co]:
        """Yield the items."""
        ...

    def stop(self) -> None:
        """End a read that waits."""
        ...


def read_side_by_side(
    readers: Sequence[Stoppable[T]], side_by_side: int, ahead: int, size_of: Callable[[T], int]
) -> Generator[T, None, None]:
    """Merge iterables: one item from each of the first few in turn; where one ends, the next takes its place.

    Args:
        readers: What to read, in order. Each is read in a thread of its own, some megabytes ahead.
        side_by_side: Readers that give items in turn.
        ahead: Further readers that are started already.
        size_of: Bytes of an item, to bound what waits in memory: 4 MiB a reader and one item, and as much again taken.

    Yields:
        Items in an order that depends on the arguments and items alone. An exception of a reader comes at its place.
    """
    waiting = deque(readers)
    started: deque[_Lane[T]] = deque()
    lanes: list[_Lane[T]] = []
    turn = 0
    try:
        while True:
            while waiting and len(lanes) + len(started) < side_by_side + ahead:
                started.append(_Lane(waiting.popleft(), size_of))
            while started and len(lanes) < side_by_side:
                lanes.append(started.popleft())
            if not lanes:
                return
            turn %= len(lanes)
            try:
                item = lanes[turn].take()
            except _Ended:
                if started:
                    lanes[turn] = started.popleft()
                else:
                    del lanes[turn]
                continue
            turn += 1
            yield item
    finally:
        everything = [*lanes, *started]
        for lane in everything:
            lane.stop()
        for lane in everything:
            lane.join()


class _Ended(Exception):
    """A lane has no more items."""


class _Lane(Generic[T]):
    """One reader in its thread, and the items that wait for the consumer."""

    def __init__(self, reader: Stoppable[T], size_of: Callable[[T], int]) -> None:
        self._reader = reader
        self._size_of = size_of
        self._taken: deque[T] = deque()  # the consumer's own: one lock fetches all that waits
        self._waiting: deque[T] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fastdata-shard", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Return the next item; raises `_Ended` at the end, and what the reader raised."""
        if not self._taken:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                self._taken, self._waiting, self._waiting_bytes = self._waiting, self._taken, 0
                self._changed.notify()
        if self._taken:
            return self._taken.popleft()
        if self._error is not None:
            raise self._error
        raise _Ended

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._reader.stop()

    def join(self) -> None:
        """Wait for the thread; one that a library holds in a read is left to end by itself."""
        self._thread.join(_WAIT_FOR_THREAD_S)

    def _run(self) -> None:
        try:
            for item in self._reader:
                size = self._size_of(item)
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting_bytes < _WAITING_BYTES or self._stopped)
                    if self._stopped:
                        return
                    self._waiting.append(item)
                    self._waiting_bytes += size
                    self._changed.notify()
        except BaseException as exc:  # it belongs to the consumer, whatever it is
            self._error = exc
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
