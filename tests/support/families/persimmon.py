"""A family that hetpipe does not have: laid out as llama is, under other names, without a gate."""

from hetpipe.hf.family import Family

FAMILY = Family(
    model="PersimmonForCausalLM",
    kind="gpt",
    sizes={"persimmon-8b": {}},
    embed={"embed_tokens": "model.embed_tokens"},
    layers="model.layers",
    rotary="model.rotary_emb",
    head={"final_layernorm": "model.final_layernorm", "lm_head": "lm_head"},
)
