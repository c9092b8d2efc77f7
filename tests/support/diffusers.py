"""Small transformers of diffusers, of many kinds, with what each is called with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers as d

r = torch.randn
CASES: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {
    "Flux": lambda b: (
        d.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=12,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=True,
        ),
        dict(
            hidden_states=r(b, 12, 4),
            encoder_hidden_states=r(b, 5, 24),
            pooled_projections=r(b, 12),
            timestep=torch.rand(b),
            guidance=torch.ones(b),
            img_ids=torch.zeros(b, 12, 3),
            txt_ids=torch.zeros(b, 5, 3),
        ),
    ),
    "Flux2": lambda b: (
        d.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
        ),
        dict(
            hidden_states=r(b, 12, 4),
            encoder_hidden_states=r(b, 5, 24),
            timestep=torch.rand(b),
            guidance=torch.ones(b),
            img_ids=torch.zeros(b, 12, 4),
            txt_ids=torch.zeros(b, 5, 4),
        ),
    ),
    "SD3": lambda b: (
        d.SD3Transformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
        ),
        dict(hidden_states=r(b, 4, 8, 8), encoder_hidden_states=r(b, 5, 32), pooled_projections=r(b, 64), timestep=torch.rand(b)),
    ),
    "Wan": lambda b: (
        d.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=64,
            ffn_dim=32,
            num_layers=4,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
        dict(hidden_states=r(b, 4, 2, 8, 8), encoder_hidden_states=r(b, 5, 16), timestep=torch.randint(1000, (b,))),
    ),
    "QwenImage": lambda b: (
        d.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        dict(
            hidden_states=r(b, 16, 16),
            encoder_hidden_states=r(b, 5, 16),
            encoder_hidden_states_mask=torch.ones(b, 5, dtype=torch.long),
            timestep=torch.rand(b),
            img_shapes=[(1, 4, 4)] * b,
        ),
    ),
    "HunyuanVideo": lambda b: (
        d.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        dict(
            hidden_states=r(b, 4, 3, 4, 4),
            encoder_hidden_states=r(b, 6, 16),
            encoder_attention_mask=torch.ones(b, 6),
            pooled_projections=r(b, 8),
            timestep=torch.randint(1000, (b,)),
            guidance=torch.ones(b) * 1000,
        ),
    ),
    "LTX": lambda b: (
        d.LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=4,
            caption_channels=16,
            qk_norm="rms_norm_across_heads",
        ),
        dict(
            hidden_states=r(b, 16, 4),
            encoder_hidden_states=r(b, 5, 16),
            timestep=torch.randint(1000, (b,)),
            encoder_attention_mask=torch.ones(b, 5),
            num_frames=1,
            height=4,
            width=4,
        ),
    ),
    "AuraFlow": lambda b: (
        d.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            out_channels=4,
            pos_embed_max_size=256,
        ),
        dict(hidden_states=r(b, 4, 8, 8), encoder_hidden_states=r(b, 5, 32), timestep=torch.rand(b)),
    ),
    "Mochi": lambda b: (
        d.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=3,
            pooled_projection_dim=16,
            in_channels=4,
            qk_norm="rms_norm",
            text_embed_dim=16,
            time_embed_dim=4,
            max_sequence_length=16,
        ),
        dict(
            hidden_states=r(b, 4, 2, 8, 8),
            encoder_hidden_states=r(b, 5, 16),
            timestep=torch.randint(1000, (b,)),
            encoder_attention_mask=torch.ones(b, 5, dtype=torch.bool),
        ),
    ),
    "Chroma": lambda b: (
        d.ChromaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        dict(
            hidden_states=r(b, 12, 4),
            encoder_hidden_states=r(b, 6, 24),
            timestep=torch.rand(b),
            img_ids=torch.zeros(12, 3),
            txt_ids=torch.zeros(6, 3),
        ),
    ),
    "PixArt": lambda b: (
        d.PixArtTransformer2DModel(
            sample_size=8,
            num_layers=3,
            patch_size=2,
            attention_head_dim=4,
            num_attention_heads=2,
            in_channels=4,
            cross_attention_dim=8,
            out_channels=8,
            caption_channels=8,
            use_additional_conditions=False,
        ),
        dict(
            hidden_states=r(b, 4, 8, 8),
            timestep=torch.randint(1000, (b,)),
            encoder_hidden_states=r(b, 5, 8),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    ),
    "DiT": lambda b: (
        d.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=8,
            norm_type="ada_norm_zero",
            norm_elementwise_affine=False,
        ),
        dict(hidden_states=r(b, 4, 8, 8), timestep=torch.randint(1000, (b,)), class_labels=torch.randint(8, (b,))),
    ),
    "CogView4": lambda b: (
        d.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=3,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=8,
            time_embed_dim=8,
            condition_dim=4,
        ),
        dict(
            hidden_states=r(b, 4, 8, 8),
            encoder_hidden_states=r(b, 5, 8),
            timestep=torch.randint(1000, (b,)),
            original_size=torch.tensor([[64.0, 64.0]] * b),
            target_size=torch.tensor([[64.0, 64.0]] * b),
            crop_coords=torch.tensor([[0.0, 0.0]] * b),
        ),
    ),
    "CogVideoX": lambda b: (
        d.CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=8,
            num_layers=3,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=8,
        ),
        dict(hidden_states=r(b, 2, 4, 8, 8), encoder_hidden_states=r(b, 8, 8), timestep=torch.randint(1000, (b,))),
    ),
    "Sana": lambda b: (
        d.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=4,
            num_attention_heads=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=8,
        ),
        dict(hidden_states=r(b, 4, 8, 8), encoder_hidden_states=r(b, 5, 8), timestep=torch.randint(1000, (b,))),
    ),
    "Lumina2": lambda b: (
        d.Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=3,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(128, 128, 128),
            cap_feat_dim=8,
        ),
        dict(
            hidden_states=r(b, 4, 8, 8),
            encoder_hidden_states=r(b, 5, 8),
            timestep=torch.rand(b),
            encoder_attention_mask=torch.ones(b, 5, dtype=torch.bool),
        ),
    ),
    "Allegro": lambda b: (
        d.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            cross_attention_dim=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=24,
        ),
        dict(hidden_states=r(b, 4, 2, 8, 8), encoder_hidden_states=r(b, 8, 24), timestep=torch.randint(1000, (b,))),
    ),
    "ZImage": lambda b: (
        d.ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
        dict(x=[r(4, 1, 8, 8) for _ in range(b)], t=torch.rand(b), cap_feats=[r(8, 16) for _ in range(b)]),
    ),
}


def made(kind: str, samples: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model, none of whose parameters is zero, and its arguments."""
    torch.manual_seed(0)
    model, inputs = CASES[kind](samples)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval(), {**inputs, "return_dict": False}
