"""Measured layers that come with hetpipe: zorse.json, which `python -m bench.what_if.ship` makes of the files that the authors of
Zorse and Cephalo published (their licence: zorse-LICENSE.txt)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetpipe.documents.number_types import Precision
from hetpipe.exchange.importers.transformer import Cell
from hetpipe.files.formats import Document, Name, Strict
from hetpipe.files.limits import MOST_LAYERS, MOST_WIDTH
from hetpipe.hf.sizes import TransformerSizes

Width = Annotated[int, Field(strict=True, ge=1, le=MOST_WIDTH)]
Parameters = Annotated[int, Field(strict=True, ge=1, le=10**15)]


class MeasuredModel(Strict):
    """A transformer's sizes, and the seconds of one layer: card → tokens of a sample → precision → cell, whose rows are
    micro-batch sizes, forward seconds, backward seconds."""

    hidden_size: Width
    layers: Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS - 2)]
    layer_parameters: Parameters
    embedding_parameters: Parameters
    head_parameters: Parameters
    vocabulary: Width
    cells: dict[Name, dict[Annotated[int, Field(ge=1, le=MOST_WIDTH)], dict[Precision, Cell]]]

    @property
    def sizes(self) -> TransformerSizes:
        """The sizes alone, without the times."""
        return TransformerSizes(
            self.hidden_size, self.layers, self.layer_parameters, self.embedding_parameters, self.head_parameters
        )


class MeasuredLayers(Document):
    """Models, each with what was measured of it."""

    format: Literal["hetpipe.measured_layers/1"]
    source: Name
    licence: Name
    models: dict[Name, MeasuredModel]


@cache
def shipped_layers() -> MeasuredLayers:
    """The measurements that come with hetpipe."""
    return MeasuredLayers.load(Path(__file__).with_name("zorse.json"))
