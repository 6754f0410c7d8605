"""Stop a worker on SIGTERM and SIGINT."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Stop(Protocol):
    """The function that is called on a signal."""

    def __call__(self, *, now: bool) -> None:
        """Stop; with *now* at once."""


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[bool]:
    """Stop on the first signal, at once on the second, and let the third one kill.

    Only the main thread may set signal handlers; say whether they are set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    count = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        stop(now=count > 1)
        if count > 1:
            for each in signals:
                signal.signal(each, signal.SIG_DFL)

    # Plain handlers, not those of the loop: they run also while a handler blocks the loop.
    before = {each: signal.signal(each, handle) for each in signals}
    try:
        yield True
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
