"""What FastSpeed's main programs ask of a model before they train it, to print TFLOPS beside the throughput."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hetpipe.files.messages import InputError, cut
from hetpipe.layers.model import evaluating


def cnnCalculateParam(model: nn.Module, shape: Sequence[int]) -> tuple[int, int]:  # noqa: N802  # FastSpeed's name
    """(floating-point operations of one forward of a batch of this shape, parameters).

    Two operations for each multiplication and addition of the convolutions and matrix products; FastSpeed's counter has those of
    normalisation and average pooling besides. The model is as it was afterwards. InputError where it does not take such a batch.
    """
    first = next(iter(model.parameters()), torch.zeros(()))
    try:
        batch = torch.zeros(tuple(shape), dtype=first.dtype, device=first.device)
        with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(batch)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        text = f"{type(model).__name__} does not take a batch of shape {shape!r}: {' '.join(str(error).split())}"
        raise InputError(cut(f"cnnCalculateParam: {text}", 600)) from error
    return counter.get_total_flops(), sum(parameter.numel() for parameter in model.parameters())
