"""A FLUX of random numbers, and latents of three shapes for it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hetpipe.diffusion.folder import diffusers_of

SHAPES = ((16, 16), (20, 12), (12, 18))  # patches of a picture, wide and high
TEXT, CHANNELS = 32, 16
EACH = 16  # samples of a shape
SIZES = {"num_layers": 3, "num_single_layers": 7, "num_attention_heads": 4, "attention_head_dim": 32}
QUICK = {"num_layers": 1, "num_single_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32}


def make_transformer(folder: Path, *, quick: bool) -> None:
    """Save it there."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = QUICK if quick else SIZES
    others = {"joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": (8, 12, 12)}
    model = diffusers_of().FluxTransformer2DModel(in_channels=CHANNELS, guidance_embeds=True, **sizes, **others)
    model.save_pretrained(folder)


def make_latents(folder: Path) -> None:
    """Write as many samples of each shape."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    for number, (shape, sample) in enumerate(product(SHAPES, range(EACH))):
        wide, high = shape
        rows, columns = torch.meshgrid(torch.arange(float(high)), torch.arange(float(wide)), indexing="ij")
        ids = torch.stack([torch.zeros(high, wide), rows, columns], -1).reshape(-1, 3)
        tensors = {
            "latents": torch.randn(high * wide, CHANNELS, generator=draw),
            "img_ids": ids,
            "encoder_hidden_states": torch.randn(TEXT, 64, generator=draw),
            "pooled_projections": torch.randn(32, generator=draw),
            "txt_ids": torch.zeros(TEXT, 3),
        }
        save_file(tensors, folder / f"{number:03}-{sample}.safetensors")
