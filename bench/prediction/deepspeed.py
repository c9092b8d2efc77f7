"""What DeepSpeed's pipeline engine takes on a GH200 node, for the `runtime_overhead` of a cluster file. Nothing here comes from
the 15 runs that are predicted; README.md says of every number where it comes from."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from hetpipe.cluster import RuntimeOverhead

MIB = 2**20


class Used(NamedTuple):
    """Rank 0 of one run: what nvidia-smi shows, and of it what PyTorch's allocator holds and had in use at most, in MiB."""

    shown: int
    reserved: int
    allocated: float


# Another training system (Aceso's Megatron-LM) on the same machines: github.com/eth-easl/sailor at commit 16eebd41,
# sailor/Planner/baselines/Aceso/aceso_validation_clariden/runtime/OPT-350/memory/csv/*_stage0_rank0.csv (MIT licence),
# columns total_mb, max_reserved, max_allocated.
ACESO_ON_CLARIDEN = (
    Used(10993, 7110, 6704.26),
    Used(48176, 45072, 44204.95),
    Used(15239, 12338, 11736.54),
    Used(9355, 5812, 5636.60),
    Used(9748, 6416, 6326.91),
    Used(25432, 22286, 21825.64),
    Used(45643, 42372, 41063.17),
    Used(46474, 43340, 42090.84),
    Used(49226, 46288, 44392.95),
    Used(47542, 44620, 42346.84),
    Used(45752, 42596, 41396.17),
    Used(46947, 44012, 41666.53),
    Used(49500, 46572, 42179.53),
    Used(49295, 46388, 42860.83),
    Used(46239, 43108, 41907.17),
)


def deepspeed_on_gh200() -> RuntimeOverhead:
    """The section as measured elsewhere and explained."""
    return RuntimeOverhead(
        device_bytes=round(MIB * fmean(run.shown - run.reserved for run in ACESO_ON_CLARIDEN)),
        allocator_factor=round(fmean(run.reserved / run.allocated for run in ACESO_ON_CLARIDEN), 4),
        parameter_copies=1.0,
        backward_workspace=1.0,
        receive_buffers="one",
        overlap_transfers=False,
    )
