"""The fairscale back end: `fairscale.nn.Pipe` in one process a replica."""

from __future__ import annotations

from fairscale.nn import Pipe
from fairscale.nn.pipe.skip.skippable import Skippable, verify_skippables

from hetpipe.runtime.pipes.one_process import Library

library = Library(name="fairscale", pipe=Pipe, skippable=Skippable, verify=verify_skippables)
