"""What the layers of a model compute and keep, counted and not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetpipe.documents.number_types import Precision


class CountedLayer(NamedTuple):
    """Floating-point operations of one sample, forward and backward; and bytes: of parameters and of those that train, of
    buffers, of what a sample leaves for backward (`first_saved`: where the layer is the first of a stage), of what leaves the
    layer, of the copies that autocast keeps of parameters, and of the matrices that are made of quantised ones, all of them and
    the largest."""

    name: str
    forward: float
    backward: float
    parameters: int
    trained: int
    buffers: int
    saved: int
    first_saved: int
    output: int
    cast: int
    made: int = 0
    largest_made: int = 0


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model by its layers, on devices that compute at each of these precisions.

    Attributes:
        name: of the model.
        source: where its sizes are from.
        samples: what a sample is, in words.
        tokens: the rows of its widest products, of one sample.
        width: the features of these rows.
        flops: of one sample in the products of such a layer, forward.
        input_bytes: of a sample.
    """

    name: str
    source: str
    samples: str
    tokens: int
    width: int
    flops: float
    input_bytes: int
    layers: Mapping[Precision, tuple[CountedLayer, ...]]
