"""Several slow iterators, read in threads at a time and merged in an order that does not depend on their speed."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ITEMS_A_PARCEL = 16  # a queue costs about 10 us a transfer
_PARCEL_BYTES = 1 << 20
_PARCELS_WAITING = 4
_LOOK_AROUND_S = 0.1
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
        readers: What to read, in order. Each is read in a thread of its own, some parcels ahead.
        side_by_side: Readers that give items in turn.
        ahead: Further readers that are started already.
        size_of: Bytes of an item, to bound what waits in memory: about 5 MB a reader, or a few large items.

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
    """One reader in its thread, and the parcels that wait for the consumer."""

    def __init__(self, reader: Stoppable[T], size_of: Callable[[T], int]) -> None:
        self._reader = reader
        self._size_of = size_of
        self._parcels: queue.Queue[list[T] | BaseException | None] = queue.Queue(_PARCELS_WAITING)
        self._opened: deque[T] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdata-shard", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Return the next item; raises `_Ended` at the end, and what the reader raised."""
        while not self._opened:
            parcel = self._parcels.get()
            if parcel is None:
                raise _Ended
            if isinstance(parcel, BaseException):
                raise parcel
            self._opened.extend(parcel)
        return self._opened.popleft()

    def stop(self) -> None:
        self._stopped.set()
        self._reader.stop()

    def join(self) -> None:
        """Wait for the thread; one that a library holds in a read is left to end by itself."""
        deadline = time.monotonic() + _WAIT_FOR_THREAD_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._parcels.get_nowait()
            self._thread.join(_LOOK_AROUND_S / 10)

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            parcel: list[T] = []
            parcel_bytes = 0
            for item in self._reader:
                parcel.append(item)
                parcel_bytes += self._size_of(item)
                if len(parcel) == _ITEMS_A_PARCEL or parcel_bytes >= _PARCEL_BYTES:
                    if not self._put(parcel):
                        return
                    parcel, parcel_bytes = [], 0
            self._put(parcel)
        except BaseException as exc:  # it belongs to the consumer, whatever it is
            end = exc
        self._put(end)

    def _put(self, parcel: list[T] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._parcels.put(parcel, timeout=_LOOK_AROUND_S)
                return True
        return False
