"""Devices: pacing, emulated seconds, and memory that is counted and enforced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hetpipe.documents.cluster import DeviceType
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError
from hetpipe.layers.device import (
    Emulation,
    MemoryMeter,
    Pacer,
    Stopwatch,
    module_bytes,
    one_thread,
    static_storages,
    torch_device,
    usable_bytes,
)
from tests.support.blocks import Block

HOST = Measurement(
    device_type="host",
    microbatch_sizes=(1, 3),
    forward_seconds=((0.001, 0.002, 0.004), (0.003, 0.004, 0.008)),
    backward_seconds=((0.002, 0.004, 0.008), (0.004, 0.008, 0.016)),
    optimizer_seconds=(0.010, 0.020, 0.040),
)
SLOW = Emulation(slowdown=4.0, host=HOST, memory_bytes=1 << 20)


@pytest.mark.parametrize(
    ("kind", "lo", "hi", "size", "recompute", "seconds"),
    [
        ("F", 0, 3, 1, False, 4 * 0.007),
        ("F", 1, 3, 1, False, 4 * 0.006),
        ("F", 0, 3, 2, False, 4 * (0.002 + 0.003 + 0.006)),  # half-way between the measured sizes
        ("B", 0, 1, 3, False, 4 * 0.004),
        ("B", 0, 1, 3, True, 4 * (0.004 + 0.003)),
        ("F", 0, 1, 3, True, 4 * 0.003),
        ("optimizer", 1, 3, 99, False, 4 * 0.060),
    ],
)
def test_emulated_seconds(kind: str, lo: int, hi: int, size: int, recompute: bool, seconds: float) -> None:
    assert SLOW.seconds(kind, lo, hi, size, recompute=recompute) == pytest.approx(seconds)


class FakeTime:
    """A clock that goes on while one sleeps, or says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr("hetpipe.layers.device.time", made)
    return made


def test_a_paced_action_lasts_its_time(clock: FakeTime) -> None:
    pacer = Pacer()
    pacer.start(0.05, "F")
    clock.now += 0.02
    pacer.finish()
    assert clock.now == pytest.approx(100.05)
    assert pacer.overrun_seconds == 0.0


def test_a_part_of_an_action_is_reached_no_sooner_than_its_time(clock: FakeTime) -> None:
    pacer = Pacer()
    pacer.start(1.0, "F")
    for seconds in (0.02, 0.01):
        pacer.reach(seconds)
        assert clock.now == pytest.approx(100.02)
    assert pacer.overrun_seconds == 0.0


def test_an_action_that_takes_longer_is_an_overrun(clock: FakeTime) -> None:
    pacer = Pacer()
    for turn in (1, 2):
        pacer.start(0.005, "F")
        clock.now += 0.02
        pacer.finish()
        assert clock.now == pytest.approx(100 + 0.02 * turn), "nothing is left to sleep for"
    assert pacer.overrun_seconds == pytest.approx(2 * 0.015)


def test_what_is_real_takes_its_own_time_on_top(clock: FakeTime) -> None:
    pacer = Pacer()
    pacer.start(0.05, "F")
    with pacer.real():
        clock.now += 0.01
    pacer.finish()
    assert clock.now == pytest.approx(100.06)
    pacer.start(0.05, "F")
    pacer.finish()
    assert clock.now == pytest.approx(100.11), "of the action before"


def test_devices_meet_when_they_have_computed_an_equal_part_of_the_action(clock: FakeTime) -> None:
    """half of the action, the sum     the other half, the sum
    0 ───────── 0.05 ── 0.25 ───────────── 0.30 ── 0.50: 0.1 s, and the two sums' 0.4
    """
    pacer = Pacer()
    for begins, parts in ((100.0, ((0.01, 0.21), (0.22, 0.42))), (100.5, ((0.05, 0.25), (0.30, 0.50)))):
        pacer.start(0.1, "F")
        for came, after in parts:
            clock.now += 0.01
            with pacer.meeting():
                assert clock.now == pytest.approx(begins + came)
                clock.now += 0.2
            assert clock.now == pytest.approx(begins + after)
        pacer.finish()
        assert clock.now == pytest.approx(begins + 0.5), "the first of its kind does not know how many there are"
    assert pacer.overrun_seconds == 0.0
    pacer.start(0.1, "B")
    with pacer.meeting():
        assert clock.now == pytest.approx(101.0), "of another kind it is not known, either"


def test_the_meter_counts_storages_once_and_parameters_never() -> None:
    linear = nn.Linear(8, 8, bias=False)
    meter = MemoryMeter(exclude=static_storages(linear))
    x = torch.randn(4, 8, requires_grad=True)  # 128 bytes
    with meter.hooks():
        hidden = linear(x)  # saves x and the weight
        squared = hidden * hidden  # saves hidden twice
        viewed = hidden.view(2, 16).exp()  # saves its own result
    assert meter.used == meter.peak == x.nbytes + hidden.nbytes + viewed.nbytes == 3 * 128
    (squared.sum() + viewed.sum()).backward()
    del hidden, squared, viewed
    assert (meter.used, meter.peak) == (0, 3 * 128)


def test_a_graph_that_is_dropped_is_freed_too() -> None:
    meter = MemoryMeter()
    x = torch.randn(4, 8, requires_grad=True)
    with meter.hooks():
        y = x.exp().exp()
    assert meter.used == 2 * 128
    del y
    assert meter.used == 0


def test_what_is_overwritten_before_backward_is_noticed() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with MemoryMeter().hooks():
        y = x.exp()
        y += 1.0
    with pytest.raises(RuntimeError, match=r"of shape \[4, 8\], has been modified by an in-place operation"):
        y.sum().backward()


def test_gradients_of_gradients_pass_the_meter() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    with MemoryMeter().hooks():
        (first,) = torch.autograd.grad(x.exp() * x, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert float(second) == pytest.approx(4 * 7.38905609893065)


def test_a_tensor_is_held_as_long_as_the_holder_lives() -> None:
    meter = MemoryMeter()
    x = torch.zeros(4, 8)
    first, second = meter.hold(x), meter.hold(x[1:])
    assert meter.used == x.nbytes
    del first
    assert meter.used == x.nbytes
    del second
    assert meter.used == 0
    assert meter.hold(torch.zeros(0)) is not None
    assert meter.used == 0


def test_more_than_the_memory_is_the_error_that_cuda_raises() -> None:
    meter = MemoryMeter(limit=10_000, where="rank 1, replica 0 stage 1, device n0/1")
    meter.add(9_000, "the parameters")
    x = torch.randn(500, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError) as caught, meter.hooks():
        x.exp()
    assert str(caught.value).startswith(
        "out of memory on rank 1, replica 0 stage 1, device n0/1: a tensor that autograd saves for backward "
        "needs 2000 bytes more, which makes 11000 bytes of 10000 bytes"
    )


def test_up_to_the_limit_all_is_well() -> None:
    meter = MemoryMeter(limit=100)
    meter.add(100, "gradients")
    meter.free(40)
    meter.add(40, "gradients")
    assert meter.peak == 100
    with pytest.raises(
        torch.OutOfMemoryError, match="this device: gradients needs 1 bytes more, which makes 101 bytes of 100 bytes"
    ):
        meter.add(1, "gradients")


def test_module_bytes_count_shared_parameters_once() -> None:
    block = Block()  # LayerNorm 8 + 8, Linear 64 + 8: 88 floats
    assert module_bytes(nn.Sequential(block, block)) == (4 * 88, 0)
    assert module_bytes(nn.BatchNorm1d(8)) == (4 * 16, 4 * 16 + 8)


def test_an_emulated_type_is_the_cpu() -> None:
    kind = DeviceType.model_validate({"memory": "1 GiB", "emulate": {"slowdown": 2}})
    assert torch_device(kind, 5) == torch.device("cpu")


def test_a_rank_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    kind = DeviceType.model_validate({"memory": "1 GiB"})
    assert torch_device(kind, 1) == torch.device("cuda", 1)
    with pytest.raises(InputError, match="local rank 2 has no GPU: this host shows 2; correct the node's 'devices'"):
        torch_device(kind, 2)


def test_the_stopwatch_measures_the_action(clock: FakeTime) -> None:
    assert Stopwatch(torch.device("cpu")).measure(lambda: clock.sleep(0.02)) == pytest.approx(0.02)


def test_the_stopwatch_times_the_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self, stream: object) -> None:
            streams.append(stream)

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return 2.0

    streams: list[object] = []
    monkeypatch.setattr("hetpipe.layers.device.timing_event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert Stopwatch(torch.device("cuda", 1)).measure(lambda: streams.append("action")) == 0.002
    assert streams == ["stream of cuda:1", "action", "stream of cuda:1"]


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_meta_tensors_take_no_memory() -> None:
    meter = MemoryMeter()
    held: object = meter.hold(torch.zeros(8, device="meta"))
    assert isinstance(held, Tensor)
    assert meter.used == 0


def test_a_gpus_memory_is_not_all_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=24 * 2**30))
    assert 21 * 2**30 < usable_bytes(torch.device("cuda", 0)) < 23 * 2**30
