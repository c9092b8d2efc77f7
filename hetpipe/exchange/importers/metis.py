"""Metis' published profiles (Um et al., USENIX ATC '24, github.com/SamsungLabs/Metis) as a profile and a cluster.

A folder of DeviceType.NAME_tpDEGREE_bsSIZE.json files; beside it, both or neither, Metis' clusterfile (JSON: address → type,
bandwidths, memory) and hostfile (an address and its number of devices a line).

- Times are of forward and backward together, in ms: a third is taken as forward.
- Parameters are of the whole layer at every degree; a device has its part of them.
- Memory is all that a layer takes, in MB: what it saves of a sample is how much more a larger batch takes; with one batch size,
  what is left of parameters, gradients and two moments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.profile import LayerProfile, OptimizerProfile, Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers.options import (
    Imported,
    ImportOptions,
    NodeSpec,
    given_cluster,
    make_cluster,
    mapping,
    numbers,
    split_by,
)
from hetpipe.files.formats import read_mapping, read_text
from hetpipe.files.messages import InputError, shown

FORWARD = 1 / 3
MIB = 2**20
_NAME = re.compile(r"DeviceType\.(\w+?)_tp([0-9]+)_bs([0-9]+)\.json")


class _File(NamedTuple):
    seconds: list[float]
    memory: list[float]
    parameters: list[float]
    optimizer: float


def import_metis(sources: Sequence[Path], options: ImportOptions) -> Imported:
    """The profile of the folder, and the cluster of clusterfile and hostfile (or of the options, without them)."""
    if len(sources) not in (1, 3):
        raise InputError(
            f"metis takes a folder alone, or a folder, a clusterfile and a hostfile, but {len(sources)} paths were given"
        )
    options.require("Metis", "hidden_size", "sequence_length")
    files = _read(sources[0])
    first = next(iter(files.values()))
    degrees = sorted({(kind, degree) for kind, degree, _ in files})
    measurements = tuple(_measurement(kind, degree, files) for kind, degree in degrees)
    base = next(iter(files))
    saved = _saved(base[0], min(d for k, d in degrees if k == base[0]), files)
    output = options.sequence_length * options.hidden_size * options.number_bytes
    last = len(first.seconds) - 1
    layers = tuple(
        LayerProfile(
            name="embedding" if i == 0 else "head" if i == last else f"block.{i - 1}",
            parameter_bytes=round(p),
            output_bytes_per_sample=output if i < last else 4,
            saved_bytes_per_sample=saved[i],
        )
        for i, p in enumerate(first.parameters)
    )
    profile = Profile(
        format="hetpipe.profile/1",
        model=options.model,
        layers=layers,
        measurements=measurements,
        optimizer=OptimizerProfile(state_bytes_per_parameter_byte=6.0 if options.number_bytes == 2 else 2.0),
        provenance={"source": f"Metis (ATC '24), {sources[0].name}", "forward_part_of_times": FORWARD},
    )
    return Imported(profile, metis_cluster(sources[1], sources[2], options) if len(sources) == 3 else given_cluster(options))


def _read(folder: Path) -> dict[tuple[str, int, int], _File]:
    """(device type, degree, micro-batch size) → file."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of DeviceType.NAME_tpDEGREE_bsSIZE.json files")
    found = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[2]) and int(match[3]):
            found[match[1], int(match[2]), int(match[3])] = _file(path)
    if not found:
        raise InputError(f"{folder} has no file DeviceType.NAME_tpDEGREE_bsSIZE.json")
    counts = {len(file.seconds) for file in found.values()}
    if len(counts) > 1:
        raise InputError(f"{folder}: the files have different numbers of layers: {sorted(counts)}")
    return dict(sorted(found.items()))


def _file(path: Path) -> _File:
    document = read_mapping(path)
    times = mapping(document, str(path), "execution_time")
    memory = mapping(document, str(path), "execution_memory")
    model = mapping(mapping(document, str(path), "model"), str(path), "parameters")
    ms = numbers(times.get("layer_compute_total_ms"), f"{path}: layer_compute_total_ms")
    if not ms:
        raise InputError(f"{path}: layer_compute_total_ms is empty")
    optimizer = numbers([times.get("optimizer_time_ms", 0.0)], f"{path}: optimizer_time_ms")[0]
    return _File(
        [x / 1e3 for x in ms],
        [x * MIB for x in numbers(memory.get("layer_memory_total_mb"), f"{path}: layer_memory_total_mb", len(ms))],
        numbers(model.get("parameters_per_layer_bytes"), f"{path}: parameters_per_layer_bytes", len(ms)),
        optimizer / 1e3,
    )


def _of(kind: str, degree: int, files: dict[tuple[str, int, int], _File]) -> dict[int, _File]:
    return {size: file for (k, d, size), file in files.items() if (k, d) == (kind, degree)}


def _saved(kind: str, degree: int, files: dict[tuple[str, int, int], _File]) -> list[int]:
    """Bytes that one sample leaves in each layer of one device."""
    sizes = _of(kind, degree, files)
    small, large = min(sizes), max(sizes)
    if large > small:
        pairs = zip(sizes[small].memory, sizes[large].memory, strict=True)
        return [max(0, round((b - a) / (large - small))) for a, b in pairs]
    file = sizes[small]
    return [max(0, round((m - 4 * p / degree) / small)) for m, p in zip(file.memory, file.parameters, strict=True)]


def _measurement(kind: str, degree: int, files: dict[tuple[str, int, int], _File]) -> Measurement:
    sizes = _of(kind, degree, files)
    one = sizes[min(sizes)]
    return Measurement(
        device_type=kind,
        tensor_parallel=degree,
        microbatch_sizes=tuple(sizes),
        forward_seconds=tuple(tuple(FORWARD * t for t in file.seconds) for file in sizes.values()),
        backward_seconds=tuple(tuple((1 - FORWARD) * t for t in file.seconds) for file in sizes.values()),
        optimizer_seconds=split_by(one.optimizer, one.parameters),
        parameter_bytes=tuple(round(p / degree) for p in one.parameters) if degree > 1 else None,
        saved_bytes_per_sample=tuple(_saved(kind, degree, files)) if degree > 1 else None,
    )


def metis_cluster(clusterfile: Path, hostfile: Path, options: ImportOptions) -> Cluster:
    """Nodes in the hostfile's order. Bandwidths are bytes per second (Metis' guide), or, below 10⁵, GB/s (its example)."""
    entries = mapping(read_mapping(clusterfile), str(clusterfile))
    nodes = [_entry(line, entries, hostfile) for line in _lines(hostfile)]
    kinds = {spec.kind: entry for spec, entry in nodes}
    memory = {kind: round(_number(entry, "memory", clusterfile) * 10**9) for kind, entry in kinds.items()}

    def link(kind: str, key: str) -> Link:
        rate = _number(kinds[kind], key, clusterfile)
        return Link(bandwidth=rate if rate >= 1e5 else rate * 1e9)

    def between(a: str, b: str) -> Link:
        return min((link(kind, "inter_bandwidth") for kind in (a, b)), key=lambda found: found.bandwidth or 0.0)

    known = ImportOptions(model=options.model, memory={**memory, **options.memory})
    return make_cluster([spec for spec, _ in nodes], known, lambda kind: link(kind, "intra_bandwidth"), between)


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path} names no host")
    return lines


def _entry(line: str, entries: dict[str, Any], hostfile: Path) -> tuple[NodeSpec, dict[str, Any]]:
    match = re.fullmatch(r"(\S+)\s+(?:slots=)?([0-9]{1,6})", line)
    if match is None or not int(match[2]):
        raise InputError(f"{hostfile}: cannot read {shown(line)}; expected an address and a number of devices")
    entry = mapping(entries, "the clusterfile", match[1])
    kind = entry.get("instance_type")
    if not isinstance(kind, str):
        raise InputError(f"the clusterfile: {match[1]} has no instance_type")
    return NodeSpec(1, kind, int(match[2])), entry


def _number(entry: dict[str, Any], key: str, source: Path) -> float:
    found = numbers([entry.get(key)], f"{source}: {key}")[0]
    if not found:
        raise InputError(f"{source}: {key} is 0")
    return found
