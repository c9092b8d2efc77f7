"""A parameter that layers share."""

from __future__ import annotations

from typing import NamedTuple


class Tie(NamedTuple):
    """A group of layers that share a parameter, and the bytes of it that train."""

    name: str
    layers: tuple[int, ...]
    trained_bytes: int
