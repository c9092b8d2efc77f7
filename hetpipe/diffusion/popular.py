"""Transformers by the names of well-known pipelines, and what a sample of theirs is: popular.yaml. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hetpipe.files.formats import Document, Name, Number, Positive, Strict
from hetpipe.files.messages import InputError

VAE, PATCH = 8, 16  # pixels of a side that are one of latents, and of a patch of 2 × 2 of these
LARGEST = 8192


class Popular(Strict):
    """A transformer: where its configuration was read, its type, what the configuration says beside the type's defaults, the
    strength of guidance of which it is told, and the shapes of a sample's tensors, for pictures or videos of so many pixels a
    side (and so many `frames`): `latent` is side / 8, `patch` side / 16, `patches` the square of that."""

    source: Name
    type: Name
    config: dict[Name, Any] = {}
    guidance: Number | None = None
    side: Positive
    frames: Positive | None = None
    shapes: dict[Name, Any]

    def at(self, side: int | None) -> dict[str, Any]:
        """The shapes for pictures of `side` pixels. InputError where that is no multiple of 16."""
        side = side or self.side
        if side % PATCH or not 0 < side <= LARGEST:
            raise InputError(f"--side {side}: pictures have sides of {PATCH} pixels or a multiple of that, up to {LARGEST}")
        known = {"latent": side // VAE, "patch": side // PATCH, "patches": (side // PATCH) ** 2}
        return _filled(self.shapes, known)  # type: ignore[no-any-return]

    def words(self, side: int | None) -> str:
        """What a sample is."""
        each = f"{side or self.side} × {side or self.side} pixels"
        return f"samples of {each}" if self.frames is None else f"samples of {self.frames} frames of {each}"


class PopularPictures(Document):
    """Transformers by name."""

    format: Literal["hetpipe.popular_pictures/1"]
    models: dict[Name, Popular]


@cache
def popular() -> Mapping[str, Popular]:
    """Those that come with hetpipe."""
    return PopularPictures.load(Path(__file__).with_name("popular.yaml")).models


def _filled(value: Any, known: Mapping[str, int]) -> Any:
    """The value, in which names stand for numbers."""
    if isinstance(value, Mapping):
        return {key: _filled(each, known) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(each, known) for each in value]
    return known[value] if isinstance(value, str) else value
