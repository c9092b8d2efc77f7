"""Llama with its language-model head."""

from hetpipe.hf.family import Family

FAMILY = Family(
    model="LlamaForCausalLM",
    kind="llama",
    sizes={
        "llama-7b": {},  # LlamaConfig's own defaults
        "llama-13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    },
    embed={"embed_tokens": "model.embed_tokens"},
    layers="model.layers",
    rotary="model.rotary_emb",
    head={"norm": "model.norm", "lm_head": "lm_head"},
)
