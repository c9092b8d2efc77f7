"""Classes of torch that a job names with their arguments: an optimizer, and a schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from hetpipe.files.formats import Count, Name, Strict
from hetpipe.files.messages import shown


def refuse_text(data: Any) -> Any:
    """Return a section as it is; ValueError if it is a name only."""
    if isinstance(data, str):
        raise ValueError(f"write {{name: {data}}}, with its arguments, if any, behind the name")
    return data


class TorchNamed(Strict):
    """A class of torch.optim by name and its arguments."""

    model_config = {"extra": "allow", "frozen": True}

    name: Name

    @property
    def arguments(self) -> dict[str, Any]:
        """Every key but the name."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, Mapping) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{shown(key)} is {value}; write a finite number")
        return refuse_text(data)  # torch's own signature says which keys there are


class SchedulerSection(TorchNamed):
    """A class of torch.optim.lr_scheduler; `warmup_steps` puts a linear warm-up before it (for LinearLR: is it). `from_step`:
    a run that resumes from the checkpoint of this step begins this schedule there, in the place of the one that it had."""

    warmup_steps: Count = 0
    from_step: Count = 0

    @property
    def end_step(self) -> int | None:
        """After which step of the run it has come to its end, behind which its rate is 0, or rises again; None where it has
        none."""
        length = self.arguments.get({"CosineAnnealingLR": "T_max", "PolynomialLR": "total_iters"}.get(self.name, ""))
        return self.from_step + self.warmup_steps + length if isinstance(length, int) else None
