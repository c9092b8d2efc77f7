"""Whether the installed torch has kernels for a card, and which wheel has them where it has not.

Sources: PyTorch, RELEASE.md ("CUDA support matrix"); pytorch#157517, #172352 (CUDA 12.8 and later leave out Maxwell, Pascal and
Volta), #190385 (no wheels for CUDA 12.6 from 2.15 on).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from hetpipe.files.messages import InputError

TURING = (7, 5)  # the oldest that wheels for CUDA 13 drive
LAST_FOR_OLDER = "2.14"  # torch's last release with wheels for CUDA 12.6

Capability = tuple[int, int]


def check_card(index: int) -> None:
    """InputError if the installed torch has no kernels for the CUDA device of this number."""
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    fault = undriven(name, capability, torch.cuda.get_arch_list(), torch.__version__)
    if fault is not None:
        raise InputError(fault)


def undriven(name: str, capability: Capability, architectures: Sequence[str], torch_version: str) -> str | None:
    """Why this torch cannot drive the card; None where it can. `architectures` are torch's: sm_86 runs on cards of the same major
    and no lower minor number, compute_90 is compiled for any later card."""
    found = [match for match in (re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch) for arch in architectures) if match]
    binary = [(int(m[2]), int(m[3])) for m in found if m[1] == "sm"]
    portable = [(int(m[2]), int(m[3])) for m in found if m[1] == "compute"]
    runs = any(major == capability[0] and minor <= capability[1] for major, minor in binary)
    if runs or any(kernel <= capability for kernel in portable) or not found:
        return None
    known = sorted({*binary, *portable})
    what = (
        f"{name} has compute capability {_text(capability)}, and the installed torch {torch_version} has kernels for "
        f"{_text(known[0])} to {_text(known[-1])}"
    )
    if capability < TURING:
        return (
            f"{what}; cards before Turing ({_text(TURING)}) are driven by the wheels for CUDA 12.6 (cu126), which torch has up "
            f"to release {LAST_FOR_OLDER}: install one of these, or hide the card (CUDA_VISIBLE_DEVICES)"
        )
    return f"{what}; install the wheel for the newest CUDA, or a newer torch, or hide the card (CUDA_VISIBLE_DEVICES)"


def _text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def begin_backward(device: torch.device) -> None:
    """Let the thread in which autograd works on a GPU begin, by an operation for which CUDA sets it up: if its first is cuBLAS's,
    torch warns that it had to."""
    if device.type == "cuda":
        torch.zeros((), device=device, requires_grad=True).mul(1).backward()
