"""Sailor's published profiles (Strati et al., SOSP '25, github.com/eth-easl/sailor) as a profile and a cluster.

A folder with layer_times.json (model → device → micro-batch size → tensor-parallel degree → layer → [forward, backward,
optimizer] seconds), layer_sizes.json (model → degree → layer → bytes at micro-batch 1), intra_node_bandwidths.json and
multizone_bandwidths_het.json (bandwidth in GB/s as a quadratic in log2 of the size in MB, and the greatest seen, bytes/s).

- Layers were timed by hooks in a real tensor-parallel run: their times contain the all-reduces inside a layer, and the last
  layer's the loss.
- Saved bytes were measured as what a layer's forward leaves allocated, its output included. Here a layer's input counts as
  saved by it and its output does not, as in a profile of this project; so out is taken off and in added.
- The optimizer's time was measured once for the whole measured model (two of its equal layers, and all others) and written
  beside every layer: here it is spread over those layers by their parameters.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hetpipe.documents.cluster import AdapterCount, Cluster, Link
from hetpipe.documents.profile import LayerProfile, OptimizerProfile, Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers.options import (
    LARGEST,
    Imported,
    ImportOptions,
    by_number,
    make_cluster,
    mapping,
    numbers,
    parse_nodes,
)
from hetpipe.files.formats import read_mapping
from hetpipe.files.limits import LEAST_BYTES_PER_SECOND
from hetpipe.files.messages import InputError, cut, nearest, shown

MEASURED_BLOCKS = 2  # of the layers that are all alike, how many the published measurements ran
LOSS_BYTES = 4
OWN_ADAPTERS = ("GH-96",)  # on Alps a node of four GH200 has four Slingshot adapters; a node of Google's cloud has one


def import_sailor(folder: Path, options: ImportOptions) -> Imported:
    """The profile of `options.model` on every device type, and the cluster of `options.nodes` with measured links."""
    times = _choose(read_mapping(folder / "layer_times.json"), options.model, "layer_times.json")
    sizes = _choose(read_mapping(folder / "layer_sizes.json"), options.model, "layer_sizes.json")
    if "1" not in sizes:
        raise InputError(f"layer_sizes.json: {options.model!r} has no sizes at tensor-parallel degree 1")
    bytes_of = {degree: _sizes(rows, degree) for degree, rows in by_number(sizes, "layer_sizes.json").items()}
    measurements, left_out = [], []
    for device, rows in times.items():
        where = f"layer_times.json: {device}"
        found = {size: by_number(row, f"{where}, micro-batch {size}") for size, row in by_number(rows, where).items()}
        for degree in sorted({d for row in found.values() for d in row}):
            if degree in bytes_of:
                measurements.append(_measurement(found, device, degree, bytes_of))
            else:
                left_out.append(f"{device} at degree {degree}")
    profile = Profile(
        format="hetpipe.profile/1",
        model=options.model,
        layers=_layers(bytes_of[1]),
        measurements=tuple(measurements),
        optimizer=OptimizerProfile(state_bytes_per_parameter_byte=2.0),  # Adam in float32
        input_bytes_per_sample=bytes_of[1]["in"][0],
        provenance={"source": "Sailor (SOSP '25), layer_times.json and layer_sizes.json", "left_out": left_out},
    )
    return Imported(profile, sailor_cluster(folder, options) if options.nodes else None)


def sailor_cluster(folder: Path, options: ImportOptions) -> Cluster:
    """`options.nodes` with the links of the published bandwidths, which are those of one pair of devices. A node has one network
    adapter for all of its devices, but for those of GH200, of which each has its own."""
    intra = mapping(read_mapping(folder / "intra_node_bandwidths.json"), "intra_node_bandwidths.json")
    zones = mapping(read_mapping(folder / "multizone_bandwidths_het.json"), "multizone_bandwidths_het.json")

    def inside(kind: str) -> Link:
        where = f"intra_node_bandwidths.json: {kind}"
        return curve_link(_fewest(mapping(intra, "intra_node_bandwidths.json", kind), where), where)

    def between(a: str, b: str) -> Link:
        where = f"multizone_bandwidths_het.json: {options.zone}"
        here = mapping(mapping(zones, where, options.zone), where, a)
        there = mapping(mapping(_fewest(here, where), where, options.zone), where, b)
        return curve_link(_fewest(there, where), f"{where}: {a} to {b}")

    def adapters(kind: str) -> AdapterCount:
        return "per_device" if kind in OWN_ADAPTERS else 1

    return make_cluster(parse_nodes(options.nodes), options, inside, between, adapters)


def _fewest(curves: Any, where: str) -> Any:
    """What is written of the smallest number of devices."""
    return next(iter(by_number(curves, where).values()))


def curve_link(curve: Any, where: str) -> Link:
    """Points of [[a, b, c], greatest bytes/s]: GB/s = a·x² + b·x + c, x = log2(MB), at half steps of x.

    A quadratic is no model of small messages (it falls to zero) nor of large ones (it falls again): times below the size
    that takes least stay at that least, and bandwidth stays at its peak, or at the greatest measured, above it.
    """
    if not isinstance(curve, list) or len(curve) != 2 or not _is_number(curve[1]) or not curve[1] > 0:
        raise InputError(f"{where}: expected [[a, b, c], greatest bytes per second], found {shown(curve)}")
    if not isinstance(curve[0], list) or len(curve[0]) != 3 or not all(map(_is_number, curve[0])):
        raise InputError(f"{where}: expected three coefficients, found {shown(curve[0])}")
    a, b, _ = curve[0]
    x = np.arange(-10, 12.5, 0.5)
    peak = -b / (2 * a) if a < 0 else np.inf
    rate = np.minimum(np.polyval(curve[0], np.minimum(x, peak)) * 1e9, curve[1])
    size = 2.0**x * 1e6
    there = rate >= LEAST_BYTES_PER_SECOND
    seconds = np.where(there, size / np.where(there, rate, 1.0), np.inf)
    first = int(np.argmin(seconds))
    if not np.isfinite(seconds[first]):
        raise InputError(f"{where}: the bandwidth is not positive at any size")
    seconds = np.maximum.accumulate(seconds[first:])
    return Link(points=tuple((round(s), float(t)) for s, t in zip(size[first:], seconds, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _choose(document: Any, model: str, where: str) -> dict[str, Any]:
    models = mapping(document, where)
    if model not in models:
        raise InputError(f"{where} has no model {model!r}{nearest(model, list(models))}")
    return mapping(models, where, model)


def _ordered(rows: Any, where: str) -> list[Any]:
    """The values of {"0": …, "1": …, …} in order."""
    found = mapping(rows, where)
    if sorted(found) != sorted(str(i) for i in range(len(found))) or not found:
        raise InputError(f"{where}: expected layers '0' to '{len(found) - 1}', found {cut(', '.join(sorted(found)), 80)}")
    return [found[str(i)] for i in range(len(found))]


def _sizes(rows: Any, degree: int) -> dict[str, list[int]]:
    """Bytes of each layer: parameters, in, out, and what its forward leaves allocated."""
    where = f"layer_sizes.json: degree {degree}"
    layers = [mapping(row, where) for row in _ordered(rows, where)]
    keys = {"parameters": "params_bytes", "in": "act_input_bytes", "out": "act_output_bytes", "left": "act_mem_bytes"}
    return {
        name: [round(x) for x in numbers([layer.get(key) for layer in layers], f"{where}: {key}")] for name, key in keys.items()
    }


def _saved(sizes: dict[str, list[int]], input_bytes: int) -> list[int]:
    """What each layer saves of one sample: what it leaves, less its output, and its input. The last layer's output is a loss,
    and what it makes on the way (logits, probabilities) is saved."""
    outputs = [*sizes["out"][:-1], LOSS_BYTES]
    inputs = [input_bytes, *sizes["out"][:-1]]
    return [max(0, left - o + i) for left, o, i in zip(sizes["left"], outputs, inputs, strict=True)]


def _layers(sizes: dict[str, list[int]]) -> tuple[LayerProfile, ...]:
    last = len(sizes["out"]) - 1
    saved = _saved(sizes, sizes["in"][0])
    return tuple(
        LayerProfile(
            name="embedding" if i == 0 else "head" if i == last else f"block.{i - 1}",
            parameter_bytes=sizes["parameters"][i],
            output_bytes_per_sample=sizes["out"][i] if i < last else LOSS_BYTES,
            saved_bytes_per_sample=saved[i],
        )
        for i in range(last + 1)
    )


def _measurement(
    times: dict[int, dict[int, Any]], device: str, degree: int, bytes_of: dict[int, dict[str, list[int]]]
) -> Measurement:
    """One device type at one degree: all micro-batch sizes that were measured at it."""
    sizes, rows = bytes_of[degree], {}
    for size in (size for size in times if degree in times[size]):
        where = f"layer_times.json: {device}, micro-batch {size}, degree {degree}"
        layers = [numbers(row, where, 3) for row in _ordered(times[size][degree], where)]
        if len(layers) != len(bytes_of[1]["out"]) or len(sizes["out"]) != len(layers):
            raise InputError(f"{where}: {len(layers)} layers, but layer_sizes.json has {len(sizes['out'])}")
        rows[size] = layers
    return Measurement(
        device_type=device,
        tensor_parallel=degree,
        microbatch_sizes=tuple(rows),
        forward_seconds=tuple(tuple(layer[0] for layer in row) for row in rows.values()),
        backward_seconds=tuple(tuple(layer[1] for layer in row) for row in rows.values()),
        optimizer_seconds=_optimizer([[layer[2] for layer in row] for row in rows.values()], sizes["parameters"]),
        parameter_bytes=tuple(sizes["parameters"]) if degree > 1 else None,
        saved_bytes_per_sample=tuple(_saved(sizes, bytes_of[1]["in"][0])) if degree > 1 else None,
    )


def _optimizer(rows: list[list[float]], parameters: list[int]) -> tuple[float, ...]:
    """Seconds of each layer, over the micro-batch sizes the median. Where one number stands beside every layer it is the step
    of the whole measured model: its seconds per byte, times each layer's bytes."""
    seconds = [median(column) for column in zip(*rows, strict=True)]
    if any(len(set(row)) > 1 for row in rows) or not any(parameters):
        return tuple(seconds)
    usual, count = Counter(parameters).most_common(1)[0]
    measured = sum(parameters) - max(0, count - MEASURED_BLOCKS) * usual
    return tuple(seconds[0] * p / measured for p in parameters)
