"""The section `elastic` of a job: what a run does that has lost some of its devices."""

from __future__ import annotations

from hetpipe.files.formats import Count, Flag, Strict


class ElasticSection(Strict):
    """The run may go on with fewer devices than its cluster has: it plans for those that are there, whatever its plan file says,
    and goes on from the last step of which all state is left. `restarts`: how often `hetpipe train` starts its ranks again after
    one was lost (torchrun has --max-restarts instead). `join`: after its next checkpoint it tries those that were lost once more
    (torchrun takes in a host as soon as it is back)."""

    restarts: Count = 3
    join: Flag = False
