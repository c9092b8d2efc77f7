"""The profile file: what every layer costs, in seconds and bytes, on every type of device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hetpipe.documents.cluster import AdapterOf, Cluster, LinkBetween
from hetpipe.documents.number_types import Precision
from hetpipe.documents.profiles.lengths import LengthFactor
from hetpipe.documents.profiles.measurement import OWN_BYTES, Array, Measurement
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.documents.profiles.tie import Tie
from hetpipe.files.formats import Bytes, Document, Factor, Name, Strict
from hetpipe.files.limits import LEAST_MODEL_SECONDS, MOST_LAYERS
from hetpipe.files.messages import Faults, InputError, nearest, shown, told

HIDDEN = 0.5  # of a transfer must be hidden behind compute, for it to count as overlapping


class LayerProfile(Strict):
    """The bytes of one layer. Saved bytes are what autograd keeps from forward to backward; a storage that several
    layers save is counted with the first of them, parameters never. `first_saved_bytes_per_sample`: those of a layer that is the
    first of a stage, without what enters it; where it is left out, as many as of any. `tied` names a group of layers that share a
    parameter of `tied_parameter_bytes` (part of `parameter_bytes` in each of them). `trained_bytes`: those of
    `parameter_bytes` that train, all of them where it is left out; only these have gradients and optimizer state. Of them,
    `tied_trained_bytes` are shared: where it is left out, `tied_parameter_bytes` if `trained_bytes` are as many, else 0."""

    name: Name
    parameter_bytes: Bytes
    output_bytes_per_sample: Bytes
    saved_bytes_per_sample: Bytes
    first_saved_bytes_per_sample: Bytes | None = None
    buffer_bytes: Bytes = 0
    tied: Name | None = None
    tied_parameter_bytes: Bytes = 0
    trained_bytes: Bytes | None = None
    tied_trained_bytes: Bytes | None = None

    @model_validator(mode="after")
    def _tied_is_a_part(self) -> Self:
        if self.tied_parameter_bytes > self.parameter_bytes:
            raise ValueError(
                f"tied_parameter_bytes is {self.tied_parameter_bytes}, more than all parameter_bytes of layer "
                f"{shown(self.name)}, {self.parameter_bytes}"
            )
        return self

    @model_validator(mode="after")
    def _trains_what_it_has(self) -> Self:
        trained, tied = self.trained, self.tied_trained
        if trained > self.parameter_bytes:
            raise ValueError(
                f"trained_bytes ({trained}) are more than parameter_bytes ({self.parameter_bytes}), of which they are a part"
            )
        if self.tied_trained_bytes is not None and tied > min(trained, self.tied_parameter_bytes):
            raise ValueError(
                f"tied_trained_bytes ({tied}) are more than trained_bytes ({trained}) or tied_parameter_bytes "
                f"({self.tied_parameter_bytes}), and are a part of both"
            )
        own = self.parameter_bytes - self.tied_parameter_bytes
        if self.trained_bytes is not None and trained - tied > own:
            raise ValueError(
                f"{trained - tied} of the trained_bytes ({trained}) are not in tied_trained_bytes ({tied}), but only {own} "
                "of the "
                "parameter_bytes are not tied. Give tied_trained_bytes, too"
            )
        return self

    @property
    def trained(self) -> int:
        """Parameter bytes that train."""
        return self.parameter_bytes if self.trained_bytes is None else self.trained_bytes

    @property
    def tied_trained(self) -> int:
        """Those of them that layers share."""
        if self.tied_trained_bytes is not None:
            return self.tied_trained_bytes
        return self.tied_parameter_bytes if self.trained_bytes is None or self.trained_bytes >= self.tied_parameter_bytes else 0


class OptimizerProfile(Strict):
    """How many bytes of optimizer state a parameter byte that trains brings (AdamW 2, SGD with momentum 1, SGD 0)."""

    state_bytes_per_parameter_byte: Factor


class Profile(Document):
    """A measured model. Where samples have other lengths from step to step, seconds are means over all steps, bytes those of the
    longest samples, and `lengths` says how steps differ. `host` holds the plain speed of the machine that emulates devices, from
    which they are paced: in fp32, or as the model is built, with whole layers; `hosts` at each other precision, and with layers
    split over so many devices, at which devices were measured."""

    format: Literal["hetpipe.profile/1"]
    model: Name
    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1, max_length=MOST_LAYERS)]
    measurements: tuple[Measurement, ...]
    links: tuple[LinkBetween, ...] = ()
    adapters: tuple[AdapterOf, ...] = ()
    overheads: tuple[DeviceOverhead, ...] = ()
    optimizer: OptimizerProfile
    input_bytes_per_sample: Bytes = 0
    target_bytes_per_sample: Bytes = 0
    host: Measurement | None = None
    hosts: tuple[Measurement, ...] | None = None
    lengths: tuple[LengthFactor, ...] | None = None
    provenance: dict[str, Any] = {}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        count = len(self.layers)
        faults = []
        seen: set[tuple[str, int, str | None]] = set()
        for m in (*self.measurements, *self._hosts):
            key = (m.device_type, m.tensor_parallel, m.precision)
            about = f"tensor_parallel {m.tensor_parallel}{f', {m.precision}' if m.precision else ''}"
            name = f"measurement of {m.device_type!r} ({about})"
            rows = (
                *m.forward_seconds,
                *m.backward_seconds,
                m.optimizer_seconds,
                *(x for name in OWN_BYTES if (x := getattr(m, name)) is not None),
            )
            faults += [f"{name}: a row has {len(row)} numbers for {count} layers" for row in rows if len(row) != count]
            if key in seen:
                faults.append(f"{name} is given twice")
            seen.add(key)
            faults += [f"{name}: {fault}" for fault in self._part_faults(m)]
        kinds = [x.device_type for x in self.overheads]
        faults += [f"overheads of {kind!r} are given twice" for kind in dict.fromkeys(kinds) if kinds.count(kind) > 1]
        if faults:
            raise Faults(faults)
        return self

    def _part_faults(self, m: Measurement) -> list[str]:
        """Layers whose tied parameter, of which each device of a group holds a part, is larger than all that it holds; and those
        of which more trains than there is."""
        own = m.parameter_bytes if m.tensor_parallel > 1 and m.parameter_bytes is not None else ()
        pairs = list(zip(self.layers, own, strict=False))
        parts = told(
            [(layer, held) for layer, held in pairs if held < layer.tied_parameter_bytes // m.tensor_parallel],
            lambda x: (
                f"layer {shown(x[0].name)} has {x[1]} parameter_bytes on each device, less than its part of "
                f"{x[0].tied_parameter_bytes} tied_parameter_bytes"
            ),
        )
        trained = zip(self.layers, m.trained_bytes or (), own or [layer.parameter_bytes for layer in self.layers], strict=False)
        return parts + told(
            [(layer, trains, held) for layer, trains, held in trained if trains > held],
            lambda x: f"layer {shown(x[0].name)} has {x[1]} trained_bytes, more than its {x[2]} parameter_bytes",
        )

    @property
    def _hosts(self) -> tuple[Measurement, ...]:
        return (*([self.host] if self.host is not None else ()), *(self.hosts or ()))

    def host_at(self, precision: Precision | None, degree: int = 1) -> Measurement:
        """Return the plain speed of the machine that emulates devices at a precision (without one, as the model is built), with
        layers split over so many devices. InputError where it was not measured."""
        alike = (precision, None, "fp32") if precision in (None, "fp32") else (precision,)
        own = [m for m in self._hosts if m.tensor_parallel == degree]
        found = next((m for one in alike for m in own if m.precision == one), None)
        if found is None:
            known = ", ".join(m.precision or "fp32" for m in own) or "none"
            at, asked = (f" at {precision}", f" --precision {precision}") if precision else ("", "")
            if degree > 1:
                at = f"{at} of layers split over {degree} devices"
            raise InputError(
                f"the profile of {self.model!r} has no 'host' measurement{at}, which emulated devices need to be paced. "
                f"Measured: {known}. Measure again with 'hetpipe profile{asked}'"
            )
        return found

    @cached_property
    def _by_key(self) -> dict[tuple[str, int], list[Measurement]]:
        found: dict[tuple[str, int], list[Measurement]] = {}
        for m in self.measurements:
            found.setdefault((m.device_type, m.tensor_parallel), []).append(m.without_backward(self.first_trained))
        return found

    def precisions(self, device_type: str) -> tuple[Precision | None, ...]:
        """At which precisions a device type was measured; None where the profile does not say."""
        return tuple(dict.fromkeys(m.precision for m in self.measurements if m.device_type == device_type))

    def in_full(self) -> dict[str, Precision]:
        """fp32 on each device type that was measured at several precisions, that one among them: where nobody says which."""
        kinds = dict.fromkeys(m.device_type for m in self.measurements)
        return {kind: "fp32" for kind in kinds if len(found := self.precisions(kind)) > 1 and "fp32" in found}

    def at(self, chosen: Mapping[str, Precision] | None) -> Profile:
        """Of the device types that `chosen` names only the measurements at this precision (which say what leaves a layer, too:
        `output_bytes`); InputError where there is none."""
        if not chosen:
            return self
        kept = tuple(m for m in self.measurements if chosen.get(m.device_type, m.precision) == m.precision)
        missing = sorted(set(chosen) - {m.device_type for m in kept})
        if missing:
            kind = missing[0]
            known = ", ".join(p or "a precision that is not said" for p in self.precisions(kind)) or "none"
            raise InputError(
                f"the profile of {self.model!r} has no measurement of device type {kind!r} at {chosen[kind]}. Measured: {known}. "
                f"Choose a measured precision, or 'auto', or measure it with 'hetpipe profile --precision {kind}={chosen[kind]}'"
            )
        return self if len(kept) == len(self.measurements) else self.model_copy(update={"measurements": kept})

    def measurement(self, device_type: str, tensor_parallel: int = 1) -> Measurement:
        """The measurement of a device type, its layers that need no backward without one; InputError naming the measured types if
        there is none, or the precisions if there are several (`at` chooses)."""
        found = self._by_key.get((device_type, tensor_parallel))
        if found is not None and len(found) > 1:
            known_at = ", ".join(m.precision or "a precision that is not said" for m in found)
            raise InputError(
                f"the profile of {self.model!r} has measurements of device type {device_type!r} at {known_at}. Choose with "
                f"--precision, for example --precision {device_type}={found[0].precision or found[1].precision}, or auto. "
                "In a job choose with train.precision"
            )
        if found is None:
            known = sorted({m.device_type for m in self.measurements})
            if tensor_parallel > 1 and device_type in known:
                raise InputError(
                    f"the profile of {self.model!r} has no measurement of device type {device_type!r} whose layers are split "
                    f"over {tensor_parallel} devices, as the plan has them: write profiler: {{tensor_parallel: "
                    f"[{tensor_parallel}]}} in the job, and measure again with 'hetpipe profile'; a profile that is read from a "
                    "file stays as it is"
                )
            degree = f" at tensor-parallel degree {tensor_parallel}" if tensor_parallel > 1 else ""
            raise InputError(
                f"the profile of {self.model!r} has no measurement of device type {device_type!r}{degree}"
                f"{nearest(device_type, known)}; measure it with 'hetpipe profile' on such a device"
            )
        return found[0]

    def on(self, cluster: Cluster) -> Profile:
        """Return the profile with the measurements of the cluster's device types. What other types would give to the next layer
        (`output_bytes`) does not count there. If a type that nodes have was not measured, all are kept, for messages that say
        which were."""
        kept = tuple(m for m in self.measurements if m.device_type in cluster.device_types)
        there = {kind for node in cluster.nodes for kind in node.devices}
        if len(kept) == len(self.measurements) or there - {m.device_type for m in kept}:
            return self
        return self.model_copy(update={"measurements": kept})

    def check(self, cluster: Cluster) -> None:
        """InputError if a type of the cluster's devices was not measured, at any tensor-parallel degree, or takes no time."""
        for kind in cluster.device_types:
            if any(kind in node.devices for node in cluster.nodes):
                degrees = [m.tensor_parallel for m in self.measurements if m.device_type == kind]
                found = self.measurement(kind, min(degrees, default=1))
                if (least := (found.forward + found.backward).sum(axis=1).min()) < LEAST_MODEL_SECONDS:
                    raise InputError(
                        f"the profile of {self.model!r} says that all layers together take {least:g} s on device "
                        f"type {kind!r}, which is impossible. Measure again with 'hetpipe profile'"
                    )

    def joined(self, cluster: Cluster) -> Cluster:
        """The cluster with what was measured of it with this profile: links and adapters (see `Cluster.with_links`), limits of
        memory, the mean seconds that an action takes more, and whether transfers overlap compute. What its file says of the last
        two stays."""
        measured = self.overheads_on(cluster)
        linked, said = cluster.with_links(self.links, self.adapters).limited(self.memory_limits), cluster.runtime_overhead
        seconds = [x.action_seconds for x in measured if x.action_seconds is not None]
        hidden = [x.transfer_overlap for x in measured if x.transfer_overlap is not None]
        found: dict[str, object] = {"action_seconds": fmean(seconds)} if seconds else {}
        found |= {"overlap_transfers": min(hidden) >= HIDDEN} if hidden else {}
        missing = {name: value for name, value in found.items() if name not in said.model_fields_set}
        return linked.model_copy(update={"runtime_overhead": said.model_copy(update=missing)}) if missing else linked

    @property
    def memory_limits(self) -> dict[str, int]:
        """Device type → the most bytes that plans may use of it, if that was found."""
        return {x.device_type: x.memory_bytes for x in self.overheads if x.memory_bytes is not None}

    def limited(self, device_type: str, memory_bytes: int) -> Profile:
        """The profile with a limit of memory that was found for a device type, or the one that it had, if that is lower."""
        own = next((x for x in self.overheads if x.device_type == device_type), DeviceOverhead(device_type=device_type))
        least = memory_bytes if own.memory_bytes is None else min(memory_bytes, own.memory_bytes)
        others = tuple(x for x in self.overheads if x.device_type != device_type)
        return self.model_copy(update={"overheads": (*others, own.model_copy(update={"memory_bytes": least}))})

    def overheads_on(self, cluster: Cluster) -> list[DeviceOverhead]:
        """What was measured of the types that the cluster's nodes have."""
        kinds = {kind for node in cluster.nodes for kind in node.devices}
        return [x for x in self.overheads if x.device_type in kinds]

    def parameter_bytes(self, tensor_parallel: int = 1, device_type: str | None = None) -> Array:
        """Parameter bytes per layer on one device, [L]."""
        return self._per_layer("parameter_bytes", tensor_parallel, device_type)

    def buffer_bytes(self, tensor_parallel: int = 1, device_type: str | None = None) -> Array:
        """Buffer bytes per layer on one device, matrices in few bits among them, [L]."""
        return self._per_layer("buffer_bytes", tensor_parallel, device_type)

    def trained_bytes(self, tensor_parallel: int = 1, device_type: str | None = None) -> Array:
        """Parameter bytes per layer that train on one device, [L]. If the measurement of a shard does not say them, as large a
        part trains as of the whole layer, in whole bytes."""
        if device_type and tensor_parallel > 1:
            own = self.measurement(device_type, tensor_parallel).trained_bytes
            if own is not None:
                return np.array(own, dtype=np.float64)
        held, whole = self.parameter_bytes(tensor_parallel, device_type), self.parameter_bytes()
        trained = np.array([layer.trained for layer in self.layers], dtype=np.float64)
        shares = np.where(held == whole, trained, np.floor(held * trained / np.maximum(whole, 1.0)))
        return np.where(trained == whole, held, shares)

    @cached_property
    def first_trained(self) -> int:
        """How many first layers need no backward, since nothing in them trains and nothing that enters them needs a gradient:
        those before the first with `trained` bytes. A gradient goes back over the boundary before layer l only if l >
        first_trained. 0 where nothing trains at all, of which a profile says nothing."""
        return next((i for i, layer in enumerate(self.layers) if layer.trained > 0), 0)

    @cached_property
    def tied_trained_bytes(self) -> Array:
        """Those per layer that it shares with others, whose gradients are summed apart, [L]."""
        return np.array([layer.tied_trained if layer.tied else 0 for layer in self.layers], dtype=np.float64)

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """The groups of layers that share a parameter which trains, by their names."""
        names = sorted({layer.tied for layer in self.layers if layer.tied is not None})
        groups = [(name, tuple(l for l, layer in enumerate(self.layers) if layer.tied == name)) for name in names]  # noqa: E741
        found = (Tie(name, members, self.layers[members[0]].tied_trained) for name, members in groups)
        return tuple(tie for tie in found if tie.trained_bytes > 0)

    @cached_property
    def _tied(self) -> list[tuple[int, LayerProfile]]:
        return [(l, layer) for l, layer in enumerate(self.layers) if layer.tied is not None]  # noqa: E741

    def repeated_bytes(self, lo: int, hi: int) -> tuple[int, int]:
        """Parameter bytes that layers [lo, hi) share, without the first that has each, and those of them that train."""
        repeated, trained, seen = 0, 0, set[str | None]()
        for l, layer in self._tied:  # noqa: E741
            if lo <= l < hi:
                if layer.tied in seen:
                    repeated += layer.tied_parameter_bytes
                    trained += layer.tied_trained
                seen.add(layer.tied)
        return repeated, trained

    def saved_bytes(self, tensor_parallel: int = 1, device_type: str | None = None) -> Array:
        """Bytes per layer that one sample leaves for backward, [L]."""
        return self._per_layer("saved_bytes_per_sample", tensor_parallel, device_type)

    def first_saved_bytes(self, tensor_parallel: int = 1, device_type: str | None = None) -> Array:
        """Return the same for a layer that is the first of a stage, [L]."""
        own = self.measurement(device_type, tensor_parallel) if device_type else None
        if own is not None and own.saved_bytes_per_sample is not None:
            return np.array(own.first_saved_bytes_per_sample or own.saved_bytes_per_sample, dtype=np.float64)
        pairs = ((layer.first_saved_bytes_per_sample, layer.saved_bytes_per_sample) for layer in self.layers)
        return np.array([saved if first is None else first for first, saved in pairs], dtype=np.float64)

    def _per_layer(self, name: str, tensor_parallel: int, device_type: str | None) -> Array:
        """The measurement's own numbers where it has them, else the layers'. At degree 1 every type holds the same tensors."""
        if device_type and (tensor_parallel > 1 or name == "saved_bytes_per_sample"):
            own = getattr(self.measurement(device_type, tensor_parallel), name)
            if own is not None:
                return np.array(own, dtype=np.float64)
        return np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64)

    def cast_bytes(self, tensor_parallel: int = 1, device_type: str | None = None) -> Array:
        """Bytes per layer of the copies of parameters that a lower precision keeps during a step, [L]."""
        own = self.measurement(device_type, tensor_parallel).cast_bytes if device_type else None
        return np.zeros(len(self.layers)) if own is None else np.array(own, dtype=np.float64)

    @cached_property
    def widths(self) -> Array:
        """Output bytes per sample and layer of each device type of which one precision is left, or of all as built [K, L]."""
        plain = tuple(layer.output_bytes_per_sample for layer in self.layers)
        decided = [m for m in self.measurements if len(self.precisions(m.device_type)) == 1]
        return np.array([m.output_bytes_per_sample or plain for m in decided] or [plain], dtype=np.float64)

    @cached_property
    def output_bytes(self) -> Array:
        """Output bytes per sample and layer, [L]: the most of all device types, so that no transfer is priced too low."""
        return np.array(self.widths.max(axis=0))

    @cached_property
    def input_bytes(self) -> Array:
        """Input bytes per sample and layer, [L]: the output of the layer before."""
        return np.concatenate([[float(self.input_bytes_per_sample)], self.output_bytes[:-1]])
