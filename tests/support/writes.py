"""What the writing of checkpoints comes to in tests: it waits, it fails, or it ends the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from hetpipe.checkpoints import checkpoint
from hetpipe.documents.job import Job
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import train_rank

SECONDS = 60.0  # within which a thread is done
SLOW_SECONDS = 0.3  # many steps of the jobs of tests


def until(true: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    for _ in range(int(SECONDS / 0.01)):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def before_writing(what: Callable[[str], object]) -> Callable[..., None]:
    """`write_tensors`, which calls this with the path of a part before it writes."""
    real = vars(checkpoint)["write_tensors"]

    def written(tensors: Any, file: Any, *others: Any) -> None:
        what(file.name)
        real(tensors, file, *others)

    return written


def write_slowly() -> None:
    """From now on, in this process."""
    vars(checkpoint)["write_tensors"] = before_writing(lambda _: time.sleep(SLOW_SECONDS))


def killed_in_writing_step_4(job: Job) -> TrainResult | None:
    """On a rank: the main rank is killed while it writes that."""

    def killed(name: str) -> None:
        if "step-00000004" in name and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    vars(checkpoint)["write_tensors"] = before_writing(killed)
    return train_rank(job)
