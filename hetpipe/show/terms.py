"""The terms of pictures and reports, in plain words; docs/glossary.md says the same of them, and has more."""

from __future__ import annotations

import re

TERMS = {
    "step": "One optimizer step: forward and backward of the global batch, the sums of gradients, the optimizer.",
    "replica": "A copy of the whole model, on one device or cut over several. Replicas work side by side, each on its "
    "share of the samples, and sum their gradients once a step. r0 s1 is stage 1 of replica 0.",
    "stage": "A run of consecutive layers on one device (or on a tensor-parallel group of devices).",
    "share": "The samples of a global batch that a replica, or a rank, gets. Written as micro-batches, 9 × 4 + 3 is nine "
    "of four samples and one of three.",
    "micro-batch": "A part of a replica's share that goes through the pipeline at once. Those that a stage has done "
    "forward and not yet backward are in flight.",
    "1F1B": "A stage's order of actions: after a few forwards, one forward and one backward in turn. Fewer activations "
    "are kept than under GPipe.",
    "GPipe": "A stage's order of actions: all forwards, then all backwards.",
    "depth": "Of a stage: how many forwards it does before its first backward (also warm-up depth). A deeper stage hides "
    "slow links and unequal neighbours, and needs memory for more micro-batches.",
    "recompute": "A stage forgets its activations and computes them again before backward. It takes time and saves memory.",
    "offload": "A stage keeps its activations in the memory of its host until backward. Copies take time, and hosts have limits.",
    "fill and drain": "At the beginning of a step the later stages wait for their first micro-batch, and at its end the "
    "earlier ones have no more work. With more and smaller micro-batches it is a smaller part of the step.",
    "slower stage": "Idle time in which a stage waits for another stage of its pipeline, which takes longer.",
    "slower optimizer": "Idle time in which a device waits for another whose optimizer takes longer.",
    "link": "The way between two devices, given by a bandwidth and a latency, or by measured points. As a cause of idle "
    "time: a message is under way.",
    "gradient sum": "Replicas add up their gradients at the end of a step, in buckets, while the last backward still runs (also "
    "sync, or all-reduce). Links decide how long it takes. As a cause of idle time: a replica whose backwards have ended waits "
    "for other replicas, or for what is left of the sums.",
    "equal split": "Equal numbers of layers, or equal numbers of samples, on every device: what other trainers do. "
    "Pictures show the faster of the two that fits.",
    "lower bound": "A time per step that no plan of the searched class can beat. It is printed with every plan.",
    "fluid bound": "A time per step that no plan of any kind can beat: layers and samples are spread over the devices like "
    "water, nothing waits and nothing is sent.",
    "gap": "How far a plan can be from the best of its class: step / lower bound − 1.",
    "peak memory": "The most bytes that a device holds in a step: parameters, gradients, optimizer state, and what the "
    "micro-batches in flight keep.",
}
_NAMES = {name.lower(): name for name in TERMS}
PATTERN = re.compile(rf"\b({'|'.join(sorted(map(re.escape, _NAMES), key=len, reverse=True))})(e?s)?\b", re.IGNORECASE)


def term(name: str) -> str | None:
    """The term of this name, however it is written; None where there is none."""
    return _NAMES.get(name.lower())


def in_short(name: str) -> str:
    """What a term means, in its first sentence: `gap: how far a plan can be …`."""
    first = TERMS[_NAMES[name.lower()]].split(". ")[0].rstrip(".")
    return f"{name}: {first[0].lower()}{first[1:]}"
