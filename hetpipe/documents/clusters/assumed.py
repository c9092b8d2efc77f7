"""What is counted of the framework on a CUDA device when nothing was measured: defaults from first principles, each with its source.

| bytes on each device | | source |
|---|--:|---|
| CUDA context, and the kernels in use | 426 MiB | measured: RTX 6000 Ada, torch 2.10 with CUDA 13 (unslothai/unsloth-zoo pull 1053); "around 400 MB" since CUDA 11.7 loads kernels when they are used (pytorch/pytorch issue 109888) |
| cuBLAS workspace | 2 × 32 MiB | a handle for forward's thread and one for backward's; 32 MiB on Hopper, less on others (cuBLAS, cublasSetWorkspace; pytorch/pytorch pull 120925) |
| an NCCL communicator, each channel | 3 × (10 + 2) MiB | to receive, buffers of the protocols Simple (4 MiB), LL128 (4.7) and LL (0.5) in pieces of 2 MiB (NCCL, init.cc), to send 2 MiB (NVIDIA/nccl issue 1685); from the neighbours in the ring, and up and down the tree |
| channels | 24 or 2 | over NVLink (NVIDIA/nccl issue 1781) or PCIe (NVIDIA/nccl-tests issue 307) |
| communicators | 3, and 1 | activations, gradients, sums of a stage; and its tensor-parallel group where the profile has such stages |

Beside those: while a layer runs backward, gradients of what it saved, at most as large; and 5 % of all, since the allocator rounds
what is above 10 MiB up to 2 MiB, half of which is 5 % of its 20 MiB segments (c10/cuda/CUDACachingAllocator). Optimizers over lists
of tensors hold one copy of the parameters (torch.optim, `foreach`), when what was saved for backward is gone: it takes that
place, and is not counted again. A stage that saves less than its parameters needs more than is counted; `parameter_copies: 1` counts it."""  # noqa: E501

from __future__ import annotations

from hetpipe.documents.cluster import BUCKET_BYTES, Cluster, RuntimeOverhead
from hetpipe.documents.profile import Profile

MIB = 2**20
CONTEXT_BYTES = 426 * MIB
CUBLAS_BYTES = 2 * 32 * MIB
CHANNEL_BYTES = 3 * (10 + 2) * MIB
NVLINK_CHANNELS, PCIE_CHANNELS = 24, 2
PCIE_BYTES_PER_SECOND = 64e9  # of 16 lanes of PCIe 5, each way; a faster link inside a node is NVLink
PIPELINE_COMMUNICATORS = 3
ALLOCATOR_FACTOR = 1.05
LEAST_CUDA_BYTES = 2 * 2**30  # what has less memory is no card that torch drives, and nothing is assumed of it
# What a runtime_overhead says of time if it says nothing.
TIMES = {"action_seconds": 0.0, "overlap_transfers": True, "bucket_bytes": BUCKET_BYTES}
LARGE = 1e9  # bytes, at which a link shows its bandwidth


def says_memory(overhead: RuntimeOverhead) -> bool:
    """Whether a file says anything of what the framework takes of a device's memory."""
    return overhead.model_copy(update=TIMES) != RuntimeOverhead()


def is_assumed(cluster: Cluster) -> bool:
    """Whether the file leaves it to be assumed: it says nothing of the framework's memory, and all devices may be CUDA cards."""
    kinds = cluster.device_types.values()
    return not says_memory(cluster.runtime_overhead) and all(
        kind.emulate is None and kind.memory >= LEAST_CUDA_BYTES for kind in kinds
    )


def assumed_overhead(cluster: Cluster, profile: Profile) -> RuntimeOverhead:
    """What is counted on each device: what was measured with the profile, of the types of a cluster the most, and what was not
    measured of one of them as assumed. What the cluster says of time stays."""
    split = any(m.tensor_parallel > 1 for m in profile.measurements)
    communicators = PIPELINE_COMMUNICATORS + split if cluster.device_count > 1 else 0
    channels = NVLINK_CHANNELS if _has_nvlink(cluster) else PCIE_CHANNELS
    context = _most(cluster, profile, "device_bytes", CONTEXT_BYTES + CUBLAS_BYTES)
    each = _most(cluster, profile, "communicator_bytes", channels * CHANNEL_BYTES)
    return cluster.runtime_overhead.model_copy(
        update={
            "device_bytes": int(context + communicators * each),
            "backward_workspace": 1.0,
            "allocator_factor": _most(cluster, profile, "allocator_factor", ALLOCATOR_FACTOR),
        }
    )


def _most(cluster: Cluster, profile: Profile, name: str, assumed: float) -> float:
    """The greatest figure of the cluster's types, each as measured, or as assumed."""
    found = _measured(profile, name)
    return max(found.get(kind, assumed) for node in cluster.nodes for kind in node.devices)


def _measured(profile: Profile, name: str) -> dict[str, float]:
    """A figure by device type, where it was measured."""
    return {x.device_type: getattr(x, name) for x in profile.overheads if getattr(x, name) is not None}


def with_assumed(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with what is measured or assumed of the framework's memory, where that is left to be assumed."""
    if not is_assumed(cluster):
        return cluster
    overhead = assumed_overhead(profile.joined(cluster), profile)
    return cluster.model_copy(update={"runtime_overhead": overhead})


def told_of(cluster: Cluster, profile: Profile) -> str:
    """What a command says of it."""
    overhead = assumed_overhead(profile.joined(cluster), profile)
    names = {"device_bytes": "the context's", "communicator_bytes": "communicators'", "allocator_factor": "the allocator's"}
    kinds = {kind for node in cluster.nodes for kind in node.devices}
    measured = [text for name, text in names.items() if kinds <= _measured(profile, name).keys()]
    return (
        "the cluster file has no runtime_overhead, so what the framework takes of each device is assumed: "
        f"{overhead.device_bytes / MIB:.0f} MiB, {overhead.allocator_factor - 1:.0%} for the allocator, and backward's gradients"
        + (f"; of these {', '.join(measured)} part was measured" if measured else "")
    )


def _has_nvlink(cluster: Cluster) -> bool:
    """Whether devices inside any node are joined by more than PCIe."""
    inside = [node.name for node in cluster.nodes if sum(node.devices.values()) > 1]
    links = {node.name: node.link for node in cluster.nodes} | {x.between[0]: x for x in cluster.links if len({*x.between}) == 1}
    return any(
        link is not None and LARGE / max(link.seconds(LARGE), 1e-300) > PCIE_BYTES_PER_SECOND
        for link in (links[name] or cluster.link for name in inside)
    )
