"""What is known of types of transformers without it: sizes that have names, and what their layers are like. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from hetpipe.hf.sizes import Kind

# By type, in keys of its configuration; the first is taken where none is named. GPT-2: Radford et al. 2019, table 2.
SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "gpt2": {
        "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
        "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
        "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
        "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
    },
    "llama": {
        "llama-7b": {},  # LlamaConfig's own defaults
        "llama-13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    },
}
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "granite", "smollm3", "cohere")
UNGATED = ("gpt2", "starcoder2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "gpt_bigcode")
ENCODERS = ("bert", "roberta", "electra", "camembert", "xlm-roberta")
KINDS: Mapping[str, Kind] = {**dict.fromkeys(GATED, "llama"), **dict.fromkeys(UNGATED, "gpt"), **dict.fromkeys(ENCODERS, "bert")}
