"""GPT-2 with its language-model head. Sizes: Radford et al. 2019, table 2."""

from hetpipe.hf.family import Family

FAMILY = Family(
    model="GPT2LMHeadModel",
    kind="gpt",
    sizes={
        "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
        "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
        "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
        "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
    },
    embed={"wte": "transformer.wte", "wpe": "transformer.wpe", "drop": "transformer.drop"},
    positions=("wpe", "n_positions"),
    layers="transformer.h",
    layer="block",
    arguments={"use_cache": False},
    head={"ln_f": "transformer.ln_f", "lm_head": "lm_head"},
    refused={"add_cross_attention": "there is no encoder here"},
)
