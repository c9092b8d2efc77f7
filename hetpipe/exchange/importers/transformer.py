"""What planners that publish only times assume about a GPT: its layers' parameters and activations, from its sizes; and the
profile of a transformer of which one layer was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hetpipe.documents.number_types import BYTES, TYPE_OF, Precision
from hetpipe.documents.profile import LayerProfile, OptimizerProfile, Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers.options import ImportOptions
from hetpipe.hf.sizes import TransformerSizes

NUMBER_BYTES: dict[Precision, int] = {precision: BYTES[number_type] for precision, number_type in TYPE_OF.items()}


class GptBytes(NamedTuple):
    """Bytes of each layer (embedding, blocks, head), on one device of a tensor-parallel group."""

    parameters: tuple[int, ...]
    saved: tuple[int, ...]
    outputs: tuple[int, ...]


def gpt_bytes(layers: int, options: ImportOptions, degree: int = 1) -> GptBytes:
    """With h the hidden size, s the sequence length, a the heads, v the vocabulary, t the degree, p bytes a number.

    Parameters: 12h² + 13h of a block (4h² attention, 8h² MLP, biases and two LayerNorms), vh of the embedding and of
    the head, all over t. Saved per sample: a block s·h·(10 + 24/t + 5·a·s/(h·t)) bytes at p = 2 (Korthikanti et al.
    2022), twice that at p = 4 but for its one-byte dropout masks, of which s·h·(2 + a·s/(h·t)); the head's logits and
    probabilities 2·s·v·p/t. Outputs: s·h·p, and 4 bytes of loss.
    """
    h, s, a, v, p, t = (
        options.hidden_size,
        options.sequence_length,
        options.attention_heads,
        options.vocabulary,
        options.number_bytes,
        degree,
    )
    masks = 2 + a * s / (h * t)
    block = s * h * ((10 + 24 / t + 5 * a * s / (h * t) - masks) * p / 2 + masks)
    inner = layers - 2
    return GptBytes(
        parameters=(v * h * p // t, *[(12 * h * h + 13 * h) * p // t] * inner, v * h * p // t),
        saved=(0, *[round(block)] * inner, round(s * h * p + 2 * s * v * p / t)),
        outputs=(*[s * h * p] * (layers - 1), 4),
    )


class Cell(NamedTuple):
    """Seconds of one layer, forward and backward, for each of these micro-batch sizes."""

    sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


def transformer_profile(
    sizes: TransformerSizes,
    cells: Mapping[tuple[str, Precision], Cell],
    options: ImportOptions,
    *,
    provenance: Mapping[str, Any],
    state_bytes_per_parameter_byte: float = 2.0,
) -> Profile:
    """Embedding, layers that are alike, and head, of which one layer was measured on each device type and at each precision. The
    embedding takes no time; the head is a matrix product at the rate of the layer. Parameters, gradients and outputs are of
    `options.number_bytes`, what is saved is of the precision (automatic mixed precision). The optimizer (Adam, unless told
    otherwise) takes memory and no time."""
    known = replace(options, hidden_size=sizes.hidden)
    plain = gpt_bytes(sizes.layers + 2, known)
    names = ["embedding", *(f"block.{i}" for i in range(sizes.layers)), "head"]
    parameters = [sizes.embedding_parameters, *[sizes.layer_parameters] * sizes.layers, sizes.head_parameters]
    return Profile(
        format="hetpipe.profile/1",
        model=options.model,
        layers=tuple(
            LayerProfile(
                name=name,
                parameter_bytes=options.number_bytes * count,
                output_bytes_per_sample=output,
                saved_bytes_per_sample=saved,
            )
            for name, count, output, saved in zip(names, parameters, plain.outputs, plain.saved, strict=True)
        ),
        measurements=tuple(_measurement(*key, cell, sizes, known) for key, cell in cells.items()),
        optimizer=OptimizerProfile(state_bytes_per_parameter_byte=state_bytes_per_parameter_byte),
        provenance=dict(provenance),
    )


def _measurement(kind: str, precision: Precision, cell: Cell, sizes: TransformerSizes, options: ImportOptions) -> Measurement:
    """Embedding, layers and head on one device type."""
    head = sizes.head_parameters / sizes.layer_parameters
    own = gpt_bytes(sizes.layers + 2, replace(options, number_bytes=NUMBER_BYTES[precision])).saved

    def rows(times: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple((0.0, *[t] * sizes.layers, head * t) for t in times)

    return Measurement(
        device_type=kind,
        precision=precision,
        microbatch_sizes=cell.sizes,
        forward_seconds=rows(cell.forward),
        backward_seconds=rows(cell.backward),
        optimizer_seconds=(0.0,) * (sizes.layers + 2),
        saved_bytes_per_sample=own,
    )
