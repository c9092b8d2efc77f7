"""What is said of a model whose layers were counted."""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.documents.profiles.counted import CountedModel


def counted_text(model: CountedModel) -> str:
    """The model in words: its size, what a sample is, and what trains."""
    layers = model.layers["fp32"]
    return f"{model.name} ({len(layers)} layers; {model.source}), {model.samples}"


def counted_notes(model: CountedModel) -> Iterator[str]:
    """What one has to know of its times."""
    forward, backward = (sum(getattr(one, way) for one in model.layers["bf16"]) for way in ("forward", "backward"))
    yield (
        f"FLOPs and bytes of the layers are counted (a sample takes {forward / 1e12:.3g} TFLOP forward, {backward / 1e12:.3g} "
        "backward). What cards reach of their rates is taken over from layers of language models that were measured. What "
        "trains, its gradients and its optimizer have 4 bytes a number."
    )
