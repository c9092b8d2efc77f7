"""Unequal batches in a training loop that is already there (DDP, Accelerate, Lightning, the Hugging Face Trainer). Read in this
order: loop (each rank's share of every batch, and the mean over all), shares (how large each is: by a plan, or measured)."""

from hetpipe.uneven.loop import (
    IGNORED,
    ShareLoader,
    ShareSampler,
    batch_shares,
    global_count,
    global_mean,
    ignore_targets,
    process_group,
    windows,
)
from hetpipe.uneven.shares import measured_shares, plan_shares, share_out

__all__ = [
    "IGNORED",
    "ShareLoader",
    "ShareSampler",
    "batch_shares",
    "global_count",
    "global_mean",
    "ignore_targets",
    "measured_shares",
    "plan_shares",
    "process_group",
    "share_out",
    "windows",
]
