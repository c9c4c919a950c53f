"""One background thread that stays a bounded number of items ahead of its consumer."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Runs `items`, which never ends, in a thread; at most `depth` items wait. An exception of `items` is raised by
    the `get` that would have returned its item, with its traceback."""

    def __init__(self, items: Iterator[T], depth: int):
        self._items = items
        self._depth = depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()
        # A daemon thread that is inside numpy when the interpreter ends aborts the process (Python < 3.14).
        atexit.register(self.close)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                item = next(self._items)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # handed to the consumer, whatever it is
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def get(self) -> T:
        """The next item; blocks until there is one."""
        if os.getpid() != self._process:
            raise RuntimeError("a loader was used after fork, where its thread does not exist: make it in the child")
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise RuntimeError("the loader is closed")

    def close(self) -> None:
        """Stop the thread and wait for it; items that nobody took are dropped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        atexit.unregister(self.close)
        if os.getpid() == self._process:
            self._thread.join()
