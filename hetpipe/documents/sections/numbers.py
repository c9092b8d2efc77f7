"""Of the section `train`: how the loss is scaled in fp16, and what cards compute products in."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from hetpipe.documents.number_types import GROWTH_INTERVAL, INITIAL_SCALE
from hetpipe.files.formats import Flag, Number, Positive, Strict


class LossScaleSection(Strict):
    """The scale of a loss in fp16, by the rule of torch.amp.GradScaler: a power of two at first, half as much after an overflow,
    twice as much after so many steps without one."""

    initial: Annotated[Number, Field(gt=0)] = INITIAL_SCALE
    growth_interval: Positive = GROWTH_INTERVAL

    @model_validator(mode="after")
    def _rounds_nothing(self) -> Self:
        if math.frexp(self.initial)[0] != 0.5:
            raise ValueError(f"initial is {self.initial:g}. Give a power of two, such as 65536, so that scaling rounds nothing")
        return self


class ArithmeticSection(Strict):
    """What changes the digits and the speed of a card's products: whether those of float32 are computed in TF32 (of about as many
    digits as bfloat16's inputs and sums in float32), and whether cuDNN may try its algorithms, and choose only such as give the
    same digits each time. What is left out is as torch has it, and must be so on all ranks."""

    tf32: Flag | None = None
    cudnn_benchmark: Flag | None = None
    cudnn_deterministic: Flag | None = None
