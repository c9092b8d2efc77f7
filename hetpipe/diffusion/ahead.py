"""Imported before ranks are forked that train a transformer of diffusers, which takes each of them four seconds. Not where there
are cards: bitsandbytes, which diffusers imports, begins CUDA, which no process can use that is forked then."""

import torch

from hetpipe.diffusion.folder import diffusers_of

if not torch.cuda.is_available():
    _ = diffusers_of().AutoModel, diffusers_of().SD3Transformer2DModel  # which it imports when it is asked for them
