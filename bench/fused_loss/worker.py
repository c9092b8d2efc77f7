"""One process that works out losses of tokens over a large vocabulary by whichever hetpipe is imported; figures as JSON."""

import json
import sys
import time
from statistics import median

import torch

from hetpipe.layers.losses.chunked import token_losses

WORDS, TOKENS, ROUNDS = 151_936, 1024, 3


def measured(width: int, trained: bool) -> dict[str, float]:
    """Return the median seconds of forward and backward."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(TOKENS, width, generator=draw).requires_grad_()
    weight = torch.randn(WORDS, width, generator=draw).mul_(0.02).requires_grad_(trained)
    labels = torch.randint(WORDS, (TOKENS,), generator=draw)
    seconds = list[float]()
    for _ in range(ROUNDS):
        features.grad = weight.grad = None
        began = time.process_time()
        token_losses(features, weight, None, labels)[0].sum().backward()
        seconds.append(time.process_time() - began)
    return {"step": median(seconds)}


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]), sys.argv[2] == "trained")))
