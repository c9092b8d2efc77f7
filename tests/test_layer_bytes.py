"""What layers hold and save, beside what stages of them do."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from hetpipe.layers.device import MemoryMeter, static_storages
from hetpipe.layers.model import Model, as_tuple
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.stage import Stage
from hetpipe.measuring.precision.layer_bytes import saved_bytes
from tests.support.zoo import ZOO, batch
from tests.test_profiler import CPU, TwiceSaved, model


@pytest.mark.parametrize("name", ["qwen3", "llama", "ours"])
def test_what_a_stage_of_any_layers_saves_is_what_was_measured_of_them(name: str) -> None:
    """Beside its inputs and targets, which lie in buffers: the first layer as the first, the others as those behind others. (A
    decoder gives tables of positions from layer to layer; an activation that works in place gets a copy of what enters.)"""
    if name == "ours":
        made = model(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), TwiceSaved(), nn.LayerNorm(8), nn.Linear(8, 2))
    else:
        inputs, targets, _ = batch(name)
        layers = ZOO[name].build(**ZOO[name].without_dropout())
        made = Model(name=name, layers=layers, inputs=inputs, targets=targets, loss=ZOO[name].loss())
    kept, (sample, wanted) = saved_bytes(made, CPU), made.sample(1)
    whole, rows = list(make_stage(made.layers, 0, len(made.layers))), [as_tuple(sample)]
    for layer in whole:
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in rows[-1]]
        rows.append(as_tuple(Stage(layer)(*given)))
    for lo, hi in itertools.combinations(range(len(made.layers) + 1), 2):
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in rows[lo]]
        stage, buffers = Stage(*whole[lo:hi]), [*given, *as_tuple(wanted)]
        meter = MemoryMeter(exclude=static_storages(stage) | {t.untyped_storage().data_ptr() for t in buffers})
        with meter.hooks():
            output = stage(*given)
            loss = made.loss.share(output, wanted, 1.0) if hi == len(made.layers) else None
        assert meter.used == kept.first[lo] + sum(kept.per_sample[lo + 1 : hi]), (lo, hi)
        del output, loss
