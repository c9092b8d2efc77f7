"""Offload: what autograd saves of a stage lies in the host's memory from the end of its layer's forward to its backward.

Forward: what a layer has saved is copied out when it has run, while the next one runs; then the device's memory is given back.
Backward: when the first tensor of a layer is asked for, those of the layer below it begin to come back. So a device holds what
two layers saved that run one after the other (as vDNN: Rhu et al. 2016, section III). A storage that several operations save, of
one layer or of layers one after the other, is copied once. What is on the device all the same stays there: parameters and
buffers, copies of parameters that autocast keeps, what has entered the stage, its output, targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetpipe.layers.host.copies import Copies


class DeviceMeter(Protocol):
    """Counts the bytes of a device."""

    def add(self, size: int, what: str) -> None: ...
    def free(self, size: int) -> None: ...
    def hold(self, tensor: Tensor) -> object: ...


class Offload:
    """Of one stage on one device. `begin` before the forward of a micro-batch, in it `layer()` around each layer, and around the
    loss; `end` when its backward is over. `host_bytes` are now on the host, `host_peak` were at most; `meter` counts those on the
    device; copies that are done at once are done in `paced()`."""

    def __init__(
        self,
        device: torch.device,
        meter: DeviceMeter | None = None,
        paced: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.copies, self.meter = Copies(device, paced), meter
        self.host_bytes = self.host_peak = 0
        self._forward = _Microbatch(self)  # the one that ran forward last
        self._leaving: _Layer | None = None  # the layer that ran last: what it saved is on the device, too
        self._returning: _Microbatch | None = None  # the one whose backward runs

    def begin(self, stays: Iterable[Tensor]) -> None:
        """A micro-batch begins; these tensors stay on the device."""
        self._forward = _Microbatch(self)
        self.stay(stays)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """These of the micro-batch stay on the device, too."""
        self._forward.stays |= {address(t) for t in tensors}

    @contextmanager
    def layer(self) -> Iterator[None]:
        """In here the next layer of the micro-batch runs forward."""
        layer = self._forward.next(self._leaving)
        self._forward.casts = torch.is_autocast_enabled(self.copies.device.type)  # in hooks it is off
        with saved_tensors_hooks(self._forward.pack, _unpack):
            yield
        self.left()
        layer.leave(self._forward.stays)
        self._leaving = layer

    def left(self) -> None:
        """What the last layer has saved is on the host, and no longer on the device."""
        if self._leaving is not None:
            self._leaving.left()
            self._leaving = None

    def come(self, microbatch: _Microbatch, number: int) -> None:
        """Backward wants what this layer of a micro-batch has saved."""
        layers = microbatch.layers
        if layers[number] is self._leaving:
            self.left()
        if not layers[number].has_left or (self._returning is microbatch and number >= microbatch.lowest):
            return
        self.left()
        self._returning = microbatch
        layers[number].come()
        self.copies.wait(layers[number].arrived)
        for above in layers[number + 1 :]:
            above.gone()
        microbatch.lowest = number
        below = next((layer for layer in reversed(layers[:number]) if layer.coming), None)
        if below is not None:
            below.come()

    def end(self) -> None:
        """The backward of a micro-batch is over."""
        if self._returning is not None:
            for layer in self._returning.layers:
                self.copies.wait(layer.arrived)
                layer.gone()
        if self._returning is self._forward:
            self._forward = _Microbatch(self)
        self._returning = None

    def drop(self) -> None:
        """What was saved is wanted no more."""
        self._forward, self._leaving, self._returning = _Microbatch(self), None, None

    def count(self, on_device: int, on_host: int = 0) -> None:
        """So many bytes more are on the device, and on the host."""
        self.host_bytes += on_host
        self.host_peak = max(self.host_peak, self.host_bytes)
        if self.meter is not None and on_device:
            if on_device > 0:
                self.meter.add(on_device, "a tensor that autograd saves for backward, on its way to or from the host")
            else:
                self.meter.free(-on_device)


class _Microbatch:
    """Its layers so far, addresses of what stays on the device, whether autocast is on, and the lowest layer whose backward has
    begun."""

    def __init__(self, offload: Offload) -> None:
        self.offload, self.layers, self.stays, self.lowest = offload, list[_Layer](), set[int](), 0
        self.casts = False

    def next(self, before: _Layer | None) -> _Layer:
        """The layer that runs next, after this one."""
        layer = _Layer(self.offload, before if self.layers and self.layers[-1] is before else None)
        self.layers.append(layer)
        return layer

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        """What autograd keeps in the place of a tensor."""
        if isinstance(tensor, nn.Parameter) or not _can_leave(tensor, self.offload.copies.device):
            return tensor
        at, layer = address(tensor), self.layers[-1]
        stays = at in self.stays or (self.casts and _is_kept_by_autocast(tensor))
        saved = _Saved(self, tensor, None if stays else layer.storage(tensor, at))
        layer.tensors.append(saved)
        return saved


class _Storage:
    """What one or more saved tensors are views of: `source` on the device until it is on the host."""

    def __init__(self, offload: Offload, source: Tensor) -> None:
        self.offload, self.source, self.size = offload, source, source.untyped_storage().nbytes()
        self.version: int | None = None  # that was copied
        self.host: Tensor | None = None
        self.back: Tensor | None = None
        self.on_device = 0  # bytes, as counted
        self.there(self.size)

    def there(self, size: int) -> None:
        """So many bytes of it are on the device."""
        self.offload.count(size - self.on_device)
        self.on_device = size

    def fetched(self) -> Tensor:
        """It on the device [bytes]; brought now, where it is gone or was not expected."""
        if self.back is None:
            assert self.host is not None
            (self.back,), arrived = self.offload.copies.back([self.host])
            self.offload.copies.wait(arrived)
            self.there(self.size)
        return self.back

    def __del__(self) -> None:
        self.offload.count(-self.on_device, -self.size if self.host is not None else 0)


class _Layer:
    """What one layer has saved of one micro-batch. `fresh`: storages that are still on the device, by their addresses. `coming`:
    those that come back when its backward is near: what a later layer saved, too, comes with that, and is `going` with this."""

    def __init__(self, offload: Offload, before: _Layer | None) -> None:
        self.offload, self.before, self.has_left = offload, before, False
        self.fresh, self.coming, self.going = dict[int, _Storage](), list[_Storage](), list[_Storage]()
        self.tensors = list[_Saved]()
        self.copied: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None

    def storage(self, tensor: Tensor, at: int) -> _Storage:
        """Of a tensor that it saves: a new one, or that of another tensor of this layer or the one before."""
        if at in self.fresh:
            return self.fresh[at]
        found = self.before.fresh.get(at) if self.before is not None else None
        if found is not None and found.version == tensor._version:
            assert self.before is not None
            del self.before.fresh[at]
            self.before.coming.remove(found)
        else:
            found = _Storage(self.offload, tensor.detach())
            self.going.append(found)
        self.fresh[at] = found
        self.coming.append(found)
        return found

    def leave(self, stays: set[int]) -> None:
        """The layer has run: what it has saved begins to go to the host, but for what stays."""
        for at in self.fresh.keys() & stays:
            self._keep(self.fresh.pop(at))
        new = [storage for storage in self.fresh.values() if storage.host is None]
        hosts, self.copied = self.offload.copies.out([_flat(storage.source) for storage in new])
        for storage, host in zip(new, hosts, strict=True):
            storage.host, storage.version = host, storage.source._version
            self.offload.count(0, storage.size)

    def _keep(self, storage: _Storage) -> None:
        """It is the stage's output, which whoever sends it holds, and counts."""
        self.coming.remove(storage)
        storage.there(0)
        for saved in self.tensors:
            if saved.storage is storage:
                saved.stay()

    def left(self) -> None:
        """What goes to the host is there, and no longer on the device."""
        self.offload.copies.wait(self.copied)
        for saved in self.tensors:
            saved.leave()
        for storage in self.fresh.values():
            storage.there(0)
            del storage.source
        self.fresh.clear()
        self.tensors.clear()
        self.before, self.has_left = None, True

    def come(self) -> None:
        """What it has saved begins to come back."""
        missing = [storage for storage in self.coming if storage.back is None]
        if missing:
            hosts = [storage.host for storage in missing if storage.host is not None]
            tensors, self.arrived = self.offload.copies.back(hosts)
            for storage, tensor in zip(missing, tensors, strict=True):
                storage.back = tensor
                storage.there(storage.size)

    def gone(self) -> None:
        """Its backward is over, and those of all above."""
        for storage in self.going:
            storage.back = None
            storage.there(0)


class _Saved:
    """A saved tensor: on the device (`tensor`, detached: an operation's own output would hold the graph that holds it) until it
    has left; and what it is of its storage, None where it stays, and is counted as `held`."""

    __slots__ = ("changed", "dtype", "held", "microbatch", "number", "offset", "shape", "storage", "stride", "tensor", "version")

    def __init__(self, microbatch: _Microbatch, tensor: Tensor, storage: _Storage | None) -> None:
        self.microbatch, self.number = microbatch, len(microbatch.layers) - 1
        self.storage, self.version, self.changed = storage, tensor._version, False
        self.dtype, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        self.tensor: Tensor | None = tensor.detach()
        self.held: object = None
        if storage is None:
            self.stay()

    def stay(self) -> None:
        """It stays on the device."""
        self.storage, meter = None, self.microbatch.offload.meter
        if meter is not None and self.tensor is not None:
            self.held = meter.hold(self.tensor)

    def leave(self) -> None:
        """It is no longer on the device, unless it stays there."""
        if self.storage is not None and self.tensor is not None:
            self.changed, self.tensor = self.tensor._version != self.version, None

    def found(self) -> Tensor:
        """The tensor on the device."""
        if self.storage is not None:
            self.microbatch.offload.come(self.microbatch, self.number)
        if self.changed or (self.tensor is not None and self.tensor._version != self.version):
            raise RuntimeError(
                f"a tensor needed for the gradient, of shape {list(self.shape)}, has been modified by an in-place operation"
            )
        if self.tensor is not None:
            return self.tensor
        assert self.storage is not None
        return self.storage.fetched().view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def _unpack(saved: _Saved | Tensor) -> Tensor:
    return saved.found() if isinstance(saved, _Saved) else saved


def address(tensor: Tensor) -> int:
    """Of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _can_leave(tensor: Tensor, device: torch.device) -> bool:
    """Whether it is a plain tensor of the device, all of which lies in one storage."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.device == device and tensor.untyped_storage().nbytes() > 0


def _flat(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_kept_by_autocast(tensor: Tensor) -> bool:
    """Whether it is, or is a view of, a copy of a parameter that trains, which autocast makes once a step
    (ATen/autocast_mode.cpp, `cached_cast`)."""
    made = (tensor if tensor._base is None else tensor._base).grad_fn
    if made is None or made.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(made.next_functions[0][0], "variable", None), nn.Parameter)
