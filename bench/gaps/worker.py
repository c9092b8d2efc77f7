"""Plan one draw, and print its devices, step, bound and the processor seconds of planning. `run` runs it by path."""

from __future__ import annotations

import json
import sys
import time

from bench.planner.run import drawn
from hetpipe.partitioners.auto import Auto, ready
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import with_prediction


def main(seed: int) -> None:
    """Print the figures of the draw; of one that nothing fits only its devices."""
    given = drawn(seed, beyond=False)
    figures = {"devices": float(len(given.cluster.devices))}
    ready()
    began = time.process_time()
    try:
        found = with_prediction(Auto()(given), given).predicted
    except PartitionError:
        found = None
    if found is not None and found.lower_bound_seconds is not None:
        figures |= {"step": found.step_seconds, "bound": found.lower_bound_seconds, "planning": time.process_time() - began}
    print(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
