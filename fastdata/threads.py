"""Worker threads that never keep a program from ending."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], object]
"""A future, the call that fills it, and the owner."""


class WorkerThreads:
    """A fixed number of threads that run calls in order; `concurrent.futures.ThreadPoolExecutor` without its trap.

    The executor's threads are no daemons and are woken at exit through a table that is filled after each start. A
    KeyboardInterrupt between the two leaves a thread that nobody wakes, and the program hangs at exit. These are
    daemons, ended and joined by a finaliser that runs before the interpreter is torn down, while they can still leave
    compiled code in an orderly way.
    """

    def __init__(self, count: int, name: str, owner: object = None) -> None:
        """Start no thread yet; they come with the first call.

        Args:
            count: Threads, at least 1.
            name: Of the threads, for debuggers.
            owner: What waits for calls when it is closed. Calls in work keep it alive: else the garbage collector,
                which runs in any thread, could close a forgotten owner within a call that the owner then waits for.
        """
        self._count = count
        self._name = name
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)  # weak: these threads are a part of it
        self._calls: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._calls, self._threads)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call a function on the next free thread."""
        while len(self._threads) < self._count:
            thread = threading.Thread(
                target=_work, args=(self._calls,), daemon=True, name=f"{self._name}-{len(self._threads)}"
            )
            self._threads.append(thread)
            thread.start()
        future: Future[Result] = Future()
        self._calls.put((future, function, arguments, self._owner()))
        return future

    def shutdown(self) -> None:
        """Cancel what has not begun, wait for what has, and end the threads. Idempotent; no call may follow."""
        self._end()


def _work(calls: queue.SimpleQueue[Work | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments, _owner = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as exc:
                future.set_exception(exc)
        del call, future, function, arguments, _owner  # else an idle thread would hold the last batch's memory


def _end(calls: queue.SimpleQueue[Work | None], threads: list[threading.Thread]) -> None:
    while True:
        try:
            call = calls.get_nowait()
        except queue.Empty:
            break
        if call is not None:
            call[0].cancel()
    for _ in threads:
        calls.put(None)
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join()
