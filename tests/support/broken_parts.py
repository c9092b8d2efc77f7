"""Parts for `test_bench_gpu.py` that do not end well. (Nothing is imported here: processes of their own load this file.)"""

from __future__ import annotations

import os
import time
from typing import Any


def raises(_subject: Any, say: Any) -> Any:
    say("about to fail")
    raise RuntimeError("CUDA error: an illegal memory access\nwas | encountered")


def dies(_subject: Any, say: Any) -> Any:
    say("the last words")
    os._exit(7)


def never_ends(_subject: Any, say: Any) -> Any:
    say("waiting")
    time.sleep(600)


def is_off(_subject: Any, _say: Any) -> Any:
    return [{"what": "gradients", "largest_difference": float("inf"), "ok": False}]


def process(_subject: Any, _say: Any) -> Any:
    return [{"process": os.getpid()}]
