"""hetpipe/layers/host/: what a stage saves lies in the host's memory, is counted there, comes back as it was, leaves nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hetpipe.layers.device import MemoryMeter, static_storages
from hetpipe.layers.host.offload import Offload
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.stage import Stage

CPU, FLOATS = torch.device("cpu"), 8  # bytes
ROWS, WIDTH, CLASSES = 16, 32, 24


class Taking(nn.Module):
    """Takes a gradient of its own in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(torch.exp(x).sum(), x, create_graph=True)
        return x + slope.tanh()


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), block, nn.Dropout(0.2), Taking(), *ends).double()


class Ran(NamedTuple):
    """What several micro-batches in flight leave: gradients, and the meter after each forward and backward."""

    gradients: list[Tensor]
    used: list[int]
    meter: MemoryMeter


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Memory is given back when the last who needs it is gone, not when somebody looks for garbage."""
    gc.disable()
    yield
    gc.enable()


def run(layers: nn.Sequential, offloaded: bool, flights: int = 3, casts: torch.dtype | None = None) -> tuple[Ran, Offload | None]:
    """All forwards with a loss, and then all backwards, as a last stage does them under GPipe."""
    stage = make_stage(layers, 0, len(layers))
    meter = MemoryMeter(exclude=static_storages(stage))
    offload = Offload(CPU, meter) if offloaded else None
    stage.offload = offload
    torch.manual_seed(1)
    data = torch.randn(flights, ROWS, WIDTH, dtype=next(layers.parameters()).dtype)
    targets = torch.randint(CLASSES, (flights, ROWS))
    inputs = [rows.clone().requires_grad_() for rows in data]
    flying, used = list[tuple[Tensor, object]](), list[int]()

    def saving(output: Tensor, wanted: Tensor) -> AbstractContextManager[object]:
        if offload is None:
            return meter.hooks()
        offload.stay((output, wanted))
        return offload.layer()

    def forward(i: int) -> None:
        meter.exclude.add(inputs[i].untyped_storage().data_ptr())
        with torch.autocast("cpu", casts, enabled=casts is not None):
            with meter.hooks():
                output = stage(inputs[i])
            held = meter.hold(output)
            with saving(output, targets[i]):
                loss = nn.functional.cross_entropy(output, targets[i])
        flying.append((loss, held))

    def backward() -> None:
        loss, _ = flying.pop(0)
        loss.backward()
        if offload is not None:
            offload.end()

    steps: list[Callable[[], None]] = [*((lambda i=i: forward(i)) for i in range(flights)), *[backward] * flights]
    with torch.autocast("cpu", casts, enabled=casts is not None):  # keeps its copies of weights until the step is over
        for step in steps:
            step()
            used.append(meter.used)
    gradients = [t.grad for t in (*layers.parameters(), *inputs)]
    for parameter in layers.parameters():
        parameter.grad = None
    return Ran([g for g in gradients if g is not None], used, meter), offload


@pytest.mark.parametrize("casts", [None, torch.bfloat16])
def test_gradients_have_the_same_bits(casts: torch.dtype | None) -> None:
    layers = chain() if casts is None else chain().float()
    (plain, _), (away, offload) = run(layers, False, casts=casts), run(layers, True, casts=casts)
    assert len(plain.gradients) == len(away.gradients) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients, away.gradients, strict=True))
    assert offload is not None
    assert offload.host_peak > 0
    assert offload.host_bytes == 0


def test_a_device_keeps_its_output_of_each_micro_batch_and_two_layers_of_one() -> None:
    layers = chain()
    (plain, _), (away, offload) = run(layers, False), run(layers, True)
    assert offload is not None
    output, loss, targets = FLOATS * ROWS * CLASSES, FLOATS * (ROWS * CLASSES + 1), FLOATS * 3 * ROWS
    assert away.used[:3] == [i * output + loss + targets for i in (1, 2, 3)], "with what the loss saved last"
    assert away.used[-1] == plain.used[-1] == 0
    assert offload.host_peak == plain.used[2] - 3 * output - targets, "all else that autograd saves, each storage once"
    assert away.meter.peak < 0.55 * plain.meter.peak
    one, alone = run(layers, True, flights=1)
    assert alone is not None
    assert away.meter.peak - one.meter.peak <= 2 * output + targets + loss, "outputs, and what the loss before saved"
    assert offload.host_peak == 3 * alone.host_peak


def test_copies_of_weights_that_autocast_keeps_stay() -> None:
    """They are there once for all micro-batches; copied with each they would take more than everything else."""
    layers = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, CLASSES))
    _, offload = run(layers, True, flights=1, casts=torch.bfloat16)
    assert offload is not None
    assert offload.host_peak < 2 * 64 * WIDTH * WIDTH, "less than the copy of the first weight"


def test_what_is_saved_by_layers_one_after_the_other_is_copied_once() -> None:
    layers = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    _, offload = run(layers, True, flights=1)
    assert offload is not None
    assert offload.host_peak == FLOATS * (3 * ROWS * WIDTH + ROWS * CLASSES + 1)


def stage_of(*layers: nn.Module) -> Stage:
    stage = make_stage(nn.Sequential(*layers), 0, len(layers))
    stage.offload = Offload(CPU)
    return stage


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_what_is_overwritten_after_it_was_saved_is_told_as_torch_tells_it() -> None:
    stage = stage_of(nn.Linear(4, 4), nn.Sigmoid(), Overwriting(), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"needed for the gradient, of shape \[2, 4\], has been modified by an in-place"):
        stage(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_a_second_backward_finds_all_again() -> None:
    stage = stage_of(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    offload, inputs = stage.offload, torch.randn(2, 4, requires_grad=True)
    assert isinstance(offload, Offload)
    loss = stage(inputs).sum()
    loss.backward(retain_graph=True)
    offload.end()
    first = inputs.grad.clone() if inputs.grad is not None else inputs
    loss.backward()
    assert inputs.grad is not None
    assert torch.equal(2 * first, inputs.grad)


def test_an_evaluation_copies_nothing() -> None:
    stage = stage_of(nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad():
        stage(torch.randn(2, 4))
    assert stage.offload is not None
    assert stage.offload.host_peak == 0


def test_too_much_on_an_emulated_device_is_out_of_memory() -> None:
    stage = make_stage(chain(), 0, 7)
    stage.offload = Offload(CPU, MemoryMeter(limit=4 * FLOATS * ROWS * WIDTH, where="n0/0", exclude=static_storages(stage)))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on n0/0: a tensor that autograd saves for backward, on"):
        stage(torch.randn(ROWS, WIDTH, dtype=torch.float64))
