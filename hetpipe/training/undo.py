"""A step that fails has changed more than gradients by then: the place in the data, buffers of layers, the scale of the loss.
Here they are put back, as long as no optimizer has moved a parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hetpipe.checkpoints.best import SavedBest
from hetpipe.checkpoints.resume import RunState
from hetpipe.layers.batch_norm import may_normalise_batches

Held = dict[tuple[nn.Module, str], tuple[Tensor, int]]  # (module, its name of a buffer) → the buffer, and its version


class Undo:
    """What a run was when its step began, on this rank. Buffers are copied as soon as it is known that steps change them: in the
    first step all, as long as they take no more than what trains, and later those that a step before has changed."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.step: int | None = None  # how many steps are done in the state that there is; None: parts of several
        self._open = False  # a step has begun whose optimizer has not
        self._best: SavedBest | None = None  # before what comes behind that step, such as an evaluation
        self._place: Any = None
        self._scale: Any = None
        self._held, self._copies = Held(), dict[tuple[nn.Module, str], Tensor]()
        self._changing: set[tuple[nn.Module, str]] | None = None
        normalising = may_normalise_batches(run.engine.stage)
        self._statistics = {(module, name) for _, module in normalising for name in module._buffers}  # torch counts no changes

    def begin(self, done: int) -> None:
        """A step begins, after so many. Before its samples are fetched."""
        now = self._buffers()
        if self._held:
            self._changing = (self._changing or set()) | self._changed(now)
        self.step, self._held, self._open = done, now, True
        scale = self.run.engine.loss_scale
        self._place, self._scale = self.run.feed.place, (scale.scale, scale.good, scale.used)
        wanted = self._changing if self._changing is not None else self._few(now)
        self._copies = {key: now[key][0].detach().clone() for key in wanted if key in now}

    def moves(self) -> None:
        """The optimizer begins to change parameters: from here on, until `moved`, nothing can be put back."""
        self.step, self._open = None, False

    def moved(self, done: int) -> None:
        """So many steps are done."""
        self.step, self._best = done, self.run.best.saved

    def whole(self) -> int | None:
        """After how many steps the state is, once what a step has begun, and what came behind the last one, is put back; None
        where it is of no step."""
        if self.step is None or (self._open and not self.put_back()):
            return None
        self.run.best.saved = self._best
        return self.step

    def put_back(self) -> bool:
        """The state at the begin of the step, which has failed before any optimizer moved. False, with nothing changed, where
        buffers have changed of which there is no copy."""
        changed = self._changed(self._buffers())
        if not changed <= self._copies.keys():
            return False
        for key in changed:
            (module, name), tensor = key, self._held[key][0]
            module._buffers[name] = tensor
            tensor.copy_(self._copies[key])
        scale = self.run.engine.loss_scale
        scale.scale, scale.good, scale.used = self._scale
        self.run.feed.place = self._place
        return True

    def _buffers(self) -> Held:
        modules = self.run.engine.stage.modules()
        return {(m, name): (t, t._version) for m in modules for name, t in m._buffers.items() if t is not None}

    def _changed(self, now: Held) -> set[tuple[nn.Module, str]]:
        found = {key for key, (tensor, version) in self._held.items() if not _is(now.get(key), tensor, version)}
        return found | (self._statistics & self._held.keys())

    def _few(self, now: Held) -> set[tuple[nn.Module, str]]:
        trained = sum(p.numel() * p.element_size() for p in self.run.engine.trained_parameters())
        return {*now} if sum(t.numel() * t.element_size() for t, _ in now.values()) <= trained else set()


def _is(found: tuple[Tensor, int] | None, tensor: Tensor, version: int) -> bool:
    return found is not None and found[0] is tensor and found[1] == version
