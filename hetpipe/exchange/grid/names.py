"""Stages as lists of a model's own modules, for systems that cut by names."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.exchange.grid.shape import Shape
from hetpipe.files.messages import InputError


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a system calls the modules of a decoder: those before its blocks, block i (`block` + i), those after them, and
    those that every stage has a copy of."""

    before: tuple[str, ...]
    block: str
    after: tuple[str, ...]
    everywhere: tuple[str, ...] = ()


TORCHTITAN = Names(before=("tok_embeddings",), block="layers.", after=("norm", "lm_head"))
TRANSFORMERS = Names(
    before=("model.embed_tokens",), block="model.layers.", after=("model.norm", "lm_head"), everywhere=("model.rotary_emb",)
)


def modules_of_stages(shape: Shape, blocks: tuple[int, int], names: Names) -> list[list[str]]:
    """The modules of each stage. Layers before the blocks are the embedding, and those after them the head: a stage that has
    a part of these only is an InputError, since a system cuts neither."""
    lo, hi = blocks
    stages = list[list[str]]()
    for s, (begin, end) in enumerate(zip(shape.ends, shape.ends[1:], strict=False)):
        found = [f"{names.block}{i - lo}" for i in range(max(begin, lo), min(end, hi))]
        found = [*(names.before if s == 0 else ()), *found, *(names.after if s == shape.pp - 1 else ())]
        if not found:
            raise InputError(
                f"stage {s} has the layers [{begin}, {end}), and no transformer block, which are the layers [{lo}, {hi}). "
                "Give the blocks with --blocks LO:HI"
            )
        stages.append([*found, *names.everywhere])
    return stages


def assumed_blocks(blocks: tuple[int, int]) -> str:
    """In words, which layer is which module."""
    lo, hi = blocks
    return f"layers {lo} to {hi - 1} are transformer blocks, those before belong to the embedding, those after to the head"
