"""Small pipelines of diffusers on disk, and folders of latents for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.diffusers import made

WHOLE = ("img_shapes", "num_frames", "height", "width")  # arguments that hold whole numbers
DDPM = {"_class_name": "DDPMScheduler", "num_train_timesteps": 1000, "prediction_type": "epsilon"}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


class Shape(NamedTuple):
    """A sample: the shape of its latents, the tensors beside them, and whole numbers."""

    latents: tuple[int, ...]
    others: dict[str, Tensor] = {}
    whole: dict[str, Any] = {}


# By the type of `tests.support.diffusers`: three shapes, of which the second and third of Flux are as large.
SHAPES: dict[str, list[Shape]] = {
    "Flux": [
        Shape((8, 4), {"img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(4.0))}),
        Shape((12, 4), {"img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(4.0))}),
        Shape((12, 4), {"img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(3.0))}),
    ],
    "QwenImage": [Shape((h * w, 16), whole={"img_shapes": [[[1, h, w]]]}) for h, w in ((4, 4), (2, 6), (6, 2))],
    "LTX": [Shape((h * w, 4), whole={"height": h, "width": w, "num_frames": 1}) for h, w in ((4, 4), (2, 6), (3, 3))],
    "ZImage": [Shape((4, 1, 8, 8)), Shape((4, 1, 4, 8))],
    **{kind: [Shape((4, 8, 8))] for kind in ("SD3", "PixArt", "Sana", "CogView4")},
    **{kind: [Shape((4, 2, 8, 8)), Shape((4, 1, 4, 8))] for kind in ("Wan", "HunyuanVideo")},
}
SKIPPED = ("hidden_states", "x", "timestep", "t", "guidance", "return_dict", "added_cond_kwargs", *WHOLE)


def pipeline(kind: str, folder: Path, scheduler: dict[str, Any] | None = None) -> Path:
    """The folder of one, with weights of `made`."""
    model, _ = made(kind, 2)
    cast(Any, model).save_pretrained(folder / "transformer")
    if scheduler is not None:
        (folder / "scheduler").mkdir()
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    return folder


def latents(kind: str, folder: Path, counts: Sequence[int]) -> Path:
    """A folder with so many samples of each shape."""
    torch.manual_seed(1)
    folder.mkdir()
    number = 0
    for shape, count in zip(SHAPES[kind], counts, strict=False):
        for _ in range(count):
            _, inputs = made(kind, 2)
            torch.manual_seed(100 + number)
            others = {name: _of_one(name, value) for name, value in inputs.items() if name not in SKIPPED}
            tensors = {"latents": torch.randn(shape.latents), **others, **shape.others}
            whole = {name: json.dumps(value) for name, value in shape.whole.items()}
            save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"{number:03}.safetensors", whole or None)
            number += 1
    return folder


def _of_one(name: str, value: Any) -> Tensor:
    """One sample's; of other numbers each time."""
    one: Tensor = value[0]
    return torch.randn_like(one) if one.is_floating_point() and "ids" not in name and "mask" not in name else one
