"""Imported before ranks are forked whose job has adapters: peft takes ten seconds of processor time in each of them. Not where
there are cards: bitsandbytes, which it imports, begins CUDA, which no process can use that is forked then."""

import torch

from hetpipe.layers.adapters.low_rank import load_peft

if not torch.cuda.is_available():
    load_peft()
