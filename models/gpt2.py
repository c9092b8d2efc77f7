"""GPT-2 of transformers (`GPT2LMHeadModel`) as a chain of layers: int64 [b, t] tokens, or (tokens, mask), to logits [b, t, v].
Its description is `hetpipe/hf/families/gpt2.py`."""

from hetpipe.hf.build import builder

build = builder("gpt2")
