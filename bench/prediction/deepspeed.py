"""What DeepSpeed's pipeline engine takes on GH200 nodes. Nothing here comes from the 15 runs that are predicted; README.md says
of every number where it comes from."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from bench.prediction.gpt_neo import GPT_NEO_RUNS
from bench.prediction.predicted import System, predict_all
from hetpipe.documents.cluster import RuntimeOverhead


class Used(NamedTuple):
    """Rank 0 of one run: what PyTorch's allocator held and what of it was in use at most, in MiB."""

    reserved: int
    allocated: float


# Another training system (Aceso's Megatron-LM), OPT-350, the same machines: github.com/eth-easl/sailor at commit 16eebd41,
# sailor/Planner/baselines/Aceso/aceso_validation_clariden/runtime/OPT-350/memory/csv/*_stage0_rank0.csv (MIT licence),
# columns max_reserved, max_allocated.
ACESO_ON_CLARIDEN = (
    Used(7110, 6704.26),
    Used(45072, 44204.95),
    Used(12338, 11736.54),
    Used(5812, 5636.60),
    Used(6416, 6326.91),
    Used(22286, 21825.64),
    Used(42372, 41063.17),
    Used(43340, 42090.84),
    Used(46288, 44392.95),
    Used(44620, 42346.84),
    Used(42596, 41396.17),
    Used(44012, 41666.53),
    Used(46572, 42179.53),
    Used(46388, 42860.83),
    Used(43108, 41907.17),
)


# NVIDIA's data sheet of the GH200 with 96 GB of HBM3.
HBM3_BYTES_PER_SECOND = 4e12


def explained() -> System:
    """What follows from how the engine works, from the data sheet, and the allocator's factor."""
    overhead = RuntimeOverhead(
        allocator_factor=round(fmean(run.reserved / run.allocated for run in ACESO_ON_CLARIDEN), 4),
        parameter_copies=1.0,
        backward_workspace=1.0,
        receive_buffers="one",
        overlap_transfers=False,
        bucket_bytes=0,
    )
    return System(overhead, memory_rate=HBM3_BYTES_PER_SECOND)


def deepspeed_on_gh200(folder: Path) -> System:
    """With the three numbers that the three measured columns of another model's runs give, each a median over all runs that
    have it: the memory that `explained` does not account for, and measured over predicted seconds of the gradient sums and of
    everything else."""
    system = explained()
    memory, sums, rest = [], [], []
    for run, row in zip(GPT_NEO_RUNS, predict_all(GPT_NEO_RUNS, folder, system), strict=True):
        predicted = row["gradient_sync_seconds"]
        memory.append(run.peak_bytes - row["predicted_bytes"])
        rest.append((run.seconds - run.sums_seconds) / (row["predicted_seconds"] - predicted))
        if run.replicas > 1:
            sums.append(run.sums_seconds / predicted)
    overhead = system.overhead.model_copy(update={"device_bytes": round(median(memory))})
    return System(overhead, round(median(rest), 4), round(median(sums), 4), system.memory_rate)
