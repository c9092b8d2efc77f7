"""The terms of the report, in plain words."""

from __future__ import annotations

TERMS = {
    "step": "One update of the model: forward and backward of the whole global batch, the sums of gradients, the optimizer.",
    "replica (r0, r1, …)": "A copy of the whole model, cut into a pipeline of stages. Replicas work side by side, each on its "
    "share of the samples, and sum their gradients once a step.",
    "stage (s0, s1, …)": "Consecutive layers on one device. r1 s0 is the first stage of replica 1.",
    "share": "How many samples of the global batch a replica gets, and in which micro-batches: 9 × 4 + 3 is nine of four samples "
    "and one of three.",
    "micro-batch": "The samples that go through a pipeline together. While one is on the second stage, the next is on the first.",
    "1f1b": "The order one forward, one backward: after a warm-up each stage does a backward as soon as it can, so that few "
    "micro-batches are in flight and memory stays low.",
    "gpipe": "The order all forwards, then all backwards: every micro-batch is in flight at once.",
    "depth": "How many forwards a stage does before its first backward: so many micro-batches it holds in memory.",
    "recompute": "A stage forgets what its layers saved and runs their forward again before their backward: less memory, "
    "more time.",
    "fill and drain": "Idle time while the first micro-batch has not reached a stage, and while the last one leaves the "
    "pipeline.",
    "slower stage": "Idle time in which a stage waits for another that takes longer.",
    "link": "What joins two devices. Idle time by the link: a message is under way.",
    "gradient sum": "All devices that hold the same layer add up their gradients, so that all of them take the same step.",
    "equal split": "What is usual: all devices alike, either a pipeline of about as many layers for each (even), or every device "
    "with the whole model and as many samples (even-data-parallel); the faster of the two that fits.",
    "lower bound": "A time that no step can be below. Below a fluid bound no plan of any kind is; below a search bound no plan "
    "of the class that was searched.",
    "fluid bound": "The time of a step if layers and samples could be spread over the devices like water: nothing waits, "
    "nothing is sent. No real plan reaches it.",
    "gap": "How far a plan is above its lower bound: 3 % means that at most 3 % of the step could be saved.",
    "peak memory": "The most bytes a device holds in a step: parameters, gradients, optimizer state, and what the micro-batches "
    "in flight keep.",
}


def glossary() -> str:
    """The terms as a list of definitions."""
    return "<dl>" + "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in TERMS.items()) + "</dl>"
