"""Llama of transformers (`LlamaForCausalLM`): a `causal_lm` of this type, whose sizes have names."""

from hetpipe.hf.replay.build import builder

build = builder("llama")
