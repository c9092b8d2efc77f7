"""The torchgpipe back end: `torchgpipe.GPipe` in one process a replica."""

from __future__ import annotations

from torchgpipe import GPipe
from torchgpipe.skip.skippable import Skippable, verify_skippables

from hetpipe.runtime.pipes.one_process import Library

library = Library(name="torchgpipe", pipe=GPipe, skippable=Skippable, verify=verify_skippables)
