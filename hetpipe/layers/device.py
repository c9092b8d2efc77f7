"""Devices: a GPU, the CPU, or an emulated device (paced compute, enforced memory, everything else real)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.documents.cluster import DeviceType
from hetpipe.documents.options import DEFAULT_RESERVE
from hetpipe.documents.profiles.lengths import LengthFactor, length_factor
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError
from hetpipe.files.units import in_bytes


def usable_bytes(gpu: torch.device) -> int:
    """What tensors may take of a GPU's memory."""
    return int((1 - DEFAULT_RESERVE) * torch.cuda.get_device_properties(gpu).total_memory)


def torch_device(device_type: DeviceType | None, local_rank: int) -> torch.device:
    """CUDA where there are GPUs and the type is not emulated, else the CPU. InputError if the local rank has no GPU."""
    if (device_type is not None and device_type.emulate is not None) or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {local_rank} has no GPU: this host shows {torch.cuda.device_count()}; "
            "correct the node's 'devices' in the cluster file, or CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank)


_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in errors of no class of their own


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this host, has no memory left for what was asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


class Pacer:
    """Makes an action compute as long as on an emulated device: it starts at `start(seconds)`, and `finish()` sleeps for what is
    left. What it does meanwhile that is not emulated (copies to the host, sums over a link) takes its own time on top. What an
    action took beyond its emulated time is its overrun; a run whose overruns exceed 1 % of the step is invalid."""

    def __init__(self) -> None:
        self.overrun_seconds = 0.0
        self._began = self._seconds = self._real = 0.0
        self._kind, self._met = "", 0
        self._meetings = dict[str, int]()  # of an action of each kind

    def start(self, seconds: float, kind: str) -> None:
        """Begin an action that computes for so many seconds on the emulated device; those of one `kind` meet other devices
        equally often."""
        self._seconds, self._real, self._kind, self._met = seconds, 0.0, kind, 0
        self._began = time.perf_counter()

    def reach(self, seconds: float) -> None:
        """Wait until the emulated device has computed for so many seconds of this action."""
        time.sleep(max(0.0, self._left(seconds)))

    def finish(self) -> None:
        """End the action when its seconds are over, or now if they have passed."""
        self._meetings[self._kind] = self._met
        left = self._left(self._seconds)
        if left > 0:
            time.sleep(left)
        else:
            self.overrun_seconds -= left

    @contextmanager
    def real(self) -> Iterator[None]:
        """Let what is done in here take its own time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._real += time.perf_counter() - began

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Wait for other devices in here, when this one has computed what comes before: an equal part of the action before each
        meeting, and all of it before the last one, as soon as an action of its kind has shown how many there are. So devices that
        compute the same come at the same time, however this machine hurries them."""
        self._met += 1
        self.reach(self._seconds * min(1.0, self._met / (self._meetings.get(self._kind) or math.inf)))
        with self.real():
            yield

    def _left(self, seconds: float) -> float:
        return self._began + seconds + self._real - time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """An emulated device: every compute action lasts `slowdown` times what the host takes (`host`: measured once per layer,
    action and micro-batch size), and its memory is `memory_bytes`. `transient_bytes` is what recomputing one layer takes.
    `lengths`: how steps differ whose samples have other lengths (see `Profile`). The first `frozen` layers need no backward."""

    slowdown: float
    host: Measurement
    memory_bytes: int
    transient_bytes: int = 0
    lengths: Sequence[LengthFactor] = ()
    frozen: int = 0

    def seconds(self, kind: str, lo: int, hi: int, size: int, *, recompute: bool = False, numbers: int | None = None) -> float:
        """How long an action ("F", "B" or "optimizer") of layers [lo, hi) lasts for `size` samples, whose inputs have so many
        `numbers` (None: as many as in the mean step)."""
        if kind == "optimizer":
            return self.slowdown * sum(self.host.optimizer_seconds[lo:hi])
        times, back = self.host.times(size), max(lo, self.frozen)
        forward = float(times[0][lo:hi].sum())
        factor = self.slowdown
        if numbers is not None:
            factor *= length_factor(self.lengths, numbers)
        if kind == "F":
            return factor * forward
        again = times[0][back:hi].sum() if recompute else 0.0
        return factor * float(times[1][back:hi].sum() + again)


@dataclass
class MemoryMeter:
    """Counts what one device holds. `add` and `free` for parameters, gradients, optimizer state and buffers; `hooks()` around a
    forward counts what autograd saves, each storage once, and never what `exclude` names (parameters and buffers, by storage
    address). Above `limit` it raises the error that CUDA would, unless it is `lenient`."""

    limit: int | None = None
    where: str = "this device"
    exclude: set[int] = field(default_factory=set)
    used: int = 0
    peak: int = 0
    lenient: bool = False
    _holders: dict[int, int] = field(default_factory=dict)
    _tensors: dict[int, Tensor] = field(default_factory=dict)

    def add(self, size: int, what: str) -> None:
        """`size` bytes more are in use; torch.OutOfMemoryError if that is above the limit."""
        self.used += size
        self.peak = max(self.peak, self.used)
        if self.limit is not None and self.used > self.limit and not self.lenient:
            raise torch.OutOfMemoryError(
                f"out of memory on {self.where}: {what} needs {in_bytes(size)} more, which makes {in_bytes(self.used)} of "
                f"{in_bytes(self.limit)} (the device type's memory in the cluster file); give the stage fewer layers, or let the "
                "plan recompute"
            )

    def free(self, size: int) -> None:
        """`size` bytes are no longer in use."""
        self.used -= size

    def own(self, tensor: Tensor, what: str) -> None:
        """Count a buffer for good: it is not counted again when autograd saves it."""
        self.exclude.add(tensor.untyped_storage().data_ptr())
        self.add(tensor.untyped_storage().nbytes(), what)

    def disown(self, tensor: Tensor) -> None:
        """The buffer is given back."""
        self.exclude.discard(tensor.untyped_storage().data_ptr())
        self.free(tensor.untyped_storage().nbytes())

    @contextmanager
    def lent(self, tensors: Iterable[Tensor], what: str) -> Iterator[None]:
        """Count these as buffers in here: each by itself, and by its own numbers, whatever memory they are views of."""
        given = list(tensors)
        for tensor in given:
            self.add(tensor.numel() * tensor.element_size(), what)
        addresses = {t.untyped_storage().data_ptr() for t in given} - self.exclude
        self.exclude |= addresses
        try:
            yield
        finally:
            self.exclude -= addresses
            self.free(sum(t.numel() * t.element_size() for t in given))

    def hooks(self) -> saved_tensors_hooks:
        """Context manager for a forward whose saved tensors are to be counted until backward frees them."""
        return saved_tensors_hooks(self._pack, _unpack)

    def hold(self, tensor: Tensor) -> object:
        """Count a tensor's storage for as long as the returned object lives."""
        return self._pack(tensor)

    @property
    def held(self) -> list[Tensor]:
        """What autograd has saved, one tensor a storage."""
        return list(self._tensors.values())

    def _pack(self, tensor: Tensor) -> _Held | Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.device.type == "meta":
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.exclude or address == 0:
            return tensor
        if self._holders.get(address, 0) == 0:
            self.add(storage.nbytes(), "a tensor that autograd saves for backward")
            self._tensors[address] = tensor.detach()
        self._holders[address] = self._holders.get(address, 0) + 1
        return _Held(self, tensor, address, storage.nbytes())

    def release(self, address: int, size: int) -> None:
        """One saved tensor of this storage is gone."""
        left = self._holders[address] - 1
        if left:
            self._holders[address] = left
        else:
            del self._holders[address], self._tensors[address]
            self.free(size)


class _Held:
    """A saved tensor; its storage counts as long as this object lives (until autograd frees the graph). It is kept detached: an
    operation's own output would hold the graph that holds it."""

    __slots__ = ("address", "meter", "size", "tensor", "version")

    def __init__(self, meter: MemoryMeter, tensor: Tensor, address: int, size: int) -> None:
        self.meter, self.tensor, self.address, self.size = meter, tensor.detach(), address, size
        self.version = tensor._version

    def __del__(self) -> None:
        self.meter.release(self.address, self.size)


def _unpack(held: _Held | Tensor) -> Tensor:
    if not isinstance(held, _Held):
        return held
    if held.tensor._version != held.version:  # under hooks, autograd leaves this check to us
        raise RuntimeError(
            f"a tensor needed for the gradient, of shape {list(held.tensor.shape)}, has been modified by an in-place operation"
        )
    return held.tensor


def static_storages(module: nn.Module) -> set[int]:
    """Addresses of a module's parameters and buffers, which a meter excludes."""
    return {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}


def module_bytes(module: nn.Module) -> tuple[int, int]:
    """(parameter bytes, buffer bytes) of a module, shared ones once."""
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    return parameters, sum(b.numel() * b.element_size() for b in module.buffers())


def trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of those that train."""
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what an optimizer keeps."""
    values = (t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    return sum(t.numel() * t.element_size() for t in values)


def timing_event() -> torch.cuda.Event:
    """A CUDA event that knows when it was."""
    return torch.cuda.Event(enable_timing=True)


class Stopwatch:
    """Measures one action on a real device: wall time on a CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def measure(self, action: Callable[[], object]) -> float:
        """Seconds that `action` takes on the device."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            action()
            return time.perf_counter() - began
        first, last = timing_event(), timing_event()
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device)  # that of the current device may be another's
        first.record(stream)
        action()
        last.record(stream)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One CPU thread while ranks share cores: two threads on a shared core were measured to be 8 times slower than one."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
