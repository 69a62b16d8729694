"""Prefetching in a second thread: the next item is made while the present one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_END, _ERROR, _ITEM = range(3)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each made by a second thread while the one before is used: at most two exist at a time.

    Raises:
        Whatever making an item raises, in the thread that asks for it.
    """
    made: queue.SimpleQueue = queue.SimpleQueue()
    room, stopped = threading.Semaphore(2), threading.Event()

    def make() -> None:
        try:
            iterator = iter(items)
            while True:
                room.acquire()
                if stopped.is_set():
                    return
                made.put((_ITEM, next(iterator)))
        except StopIteration:
            made.put((_END, None))
        except BaseException as error:
            made.put((_ERROR, error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = made.get()
            if kind == _END:
                return
            if kind == _ERROR:
                raise value
            yield value
            del value
            room.release()
    finally:
        stopped.set()
        room.release()
        thread.join()
