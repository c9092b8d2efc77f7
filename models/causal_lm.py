"""Any causal language model of transformers as a chain of layers: int64 [b, t] tokens, or (tokens, mask), to logits [b, t, v]
(or, with labels, to the loss of each token). How it is cut is in `hetpipe/hf/replay`."""

from hetpipe.hf.replay.build import build as build
