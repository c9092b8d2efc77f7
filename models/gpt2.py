"""GPT-2 of transformers (`GPT2LMHeadModel`): a `causal_lm` of this type, whose sizes have names. Its layers are called blocks, as
in the checkpoints and profiles of earlier versions."""

from hetpipe.hf.replay.build import builder

build = builder("gpt2", called="block")
