"""How steps differ whose samples have other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from hetpipe.files.formats import Factor, Strict


class LengthFactor(Strict):
    """How many times as long as in the mean a step takes whose samples have so many numbers in their inputs (tokens, pixels)."""

    numbers: Annotated[int, Field(strict=True, ge=0)]
    factor: Factor


def length_factor(lengths: Sequence[LengthFactor], numbers: int) -> float:
    """Return the factor of a step whose samples have so many numbers, linear between what was measured; 1 where steps are
    alike."""
    return float(np.interp(numbers, [x.numbers for x in lengths], [x.factor for x in lengths])) if lengths else 1.0
