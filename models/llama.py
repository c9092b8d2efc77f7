"""Llama of transformers (`LlamaForCausalLM`) as a chain of layers: int64 [b, t] tokens, or (tokens, mask), to logits [b, t, v].
Its description is `hetpipe/hf/families/llama.py`."""

from hetpipe.hf.build import builder

build = builder("llama")
