"""What the other ranks do, shown to people by the one that speaks, while it waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hetpipe.processes.peers.beats import at_work
from hetpipe.processes.progress import Activity
from hetpipe.processes.pulse import others

LOOK_SECONDS = 2.0


@contextmanager
def showing_others(activity: Activity) -> Iterator[None]:
    """The text of an activity that is shown says, while this lasts, which other ranks are at work, and with what."""
    if not activity.shown:
        yield
        return
    over = threading.Event()

    def look() -> None:
        while True:
            began = time.monotonic()
            text = at_work(others())
            if text and not over.is_set():
                activity.say(text)
            if over.wait(max(LOOK_SECONDS, 20 * (time.monotonic() - began))):  # of a thousand ranks it takes a while
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_SECONDS)
