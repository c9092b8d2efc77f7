"""Part 1: what the card and the software are."""

from __future__ import annotations

import platform
import subprocess

import torch
import torch.distributed as dist

from bench.gpu.page import Row, Rows, Say
from bench.gpu.subject import Subject
from hetpipe.files.messages import InputError
from hetpipe.files.units import human_bytes
from hetpipe.processes.cards import check_card


def environment(subject: Subject, say: Say) -> Rows:
    """Versions, and what the card says of itself."""
    say("versions")
    rows: Rows = [
        {"what": "Python", "found": platform.python_version()},
        {"what": "torch", "found": torch.__version__},
        {"what": "CUDA of this torch", "found": torch.version.cuda or "none: built for CPUs"},
    ]
    rows += _card(subject.device) if subject.device_type == "cuda" else [{"what": "device", "found": "the CPU"}]
    size = ", ".join(f"{key} {value}" for key, value in subject.arguments.items())
    rows.append({"what": "model", "found": f"gpt of {len(subject.layers())} layers ({size})"})
    rows.append({"what": "step", "found": f"{subject.microbatches} micro-batches of {subject.microbatch} samples"})
    return rows


def _card(device: torch.device) -> Rows:
    card = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return [
        {"what": "driver", "found": _driver()},
        {"what": "NCCL", "found": nccl},
        {"what": "cards that are visible", "found": torch.cuda.device_count()},
        {"what": "card, the first of them", "found": card.name},
        {"what": "compute capability", "found": f"{card.major}.{card.minor}"},
        {"what": "memory", "found": f"{human_bytes(card.total_memory)}, of which {human_bytes(free)} are free"},
        {"what": "float32 products", "found": torch.get_float32_matmul_precision()},
        _kernels(device),
    ]


def _kernels(device: torch.device) -> Row:
    """Whether this torch has kernels for the card."""
    try:
        check_card(device.index or 0)
    except InputError as error:
        return {"what": "kernels for the card", "found": str(error), "ok": False}
    return {"what": "kernels for the card", "found": ", ".join(torch.cuda.get_arch_list()), "ok": True}


def _driver() -> str:
    """The driver's version, by nvidia-smi, which comes with it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__} of nvidia-smi)"
    return said.splitlines()[0].strip() if said.strip() else "unknown"
