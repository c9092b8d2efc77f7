"""FASOP's published profiles (Hwang et al. 2024, github.com/AvatarHwang/FASOP) as a profile.

A folder of NumPy arrays MODEL_DEVICE_DEGREE.npy: forward seconds of one sample of each layer (embedding, blocks, head) on a
device type at a tensor-parallel degree. What FASOP adds itself is kept: forward and backward together are three times the
forward, times grow with the micro-batch by its factors (`fasop_factors`; of models that it does not know, with the number of
samples), embedding and head (of T5: the two embeddings) share their parameter, and bytes come from the model's sizes (which the
files do not hold). A node of `--nodes` has one network adapter, as FASOP's estimator has it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np

from hetpipe.documents.profile import LayerProfile, OptimizerProfile, Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers.fasop_factors import A100, SIZES, LayerKind, factor, layer_kinds
from hetpipe.exchange.importers.options import Imported, ImportOptions, given_cluster, numbers
from hetpipe.exchange.importers.transformer import GptBytes, gpt_bytes
from hetpipe.files.limits import MOST_LAYERS
from hetpipe.files.messages import InputError, cut, nearest

BACKWARD = 2.0  # backward over forward seconds
TIED = ("embedding", "head")  # share the table of the vocabulary


def import_fasop(folder: Path, options: ImportOptions) -> Imported:
    """The profile of `options.model` on every device type of the folder, and the cluster of the options."""
    options.require("FASOP", "hidden_size", "sequence_length", "attention_heads", "vocabulary")
    seconds = _read(folder, options.model)
    lengths = {len(row) for row in seconds.values()}
    if len(lengths) > 1 or min(lengths) < 3:
        found = ", ".join(f"{kind} at degree {degree}: {len(row)}" for (kind, degree), row in seconds.items())
        raise InputError(
            f"{folder}: expected an embedding, blocks and a head, as many in each file of {options.model!r}; found {found}"
        )
    count = lengths.pop()
    kinds = layer_kinds(options.model, count)
    whole = _of_kinds(gpt_bytes(3, options), kinds)
    layers = tuple(
        LayerProfile(
            name=name,
            parameter_bytes=whole.parameters[i],
            output_bytes_per_sample=whole.outputs[i],
            saved_bytes_per_sample=whole.saved[i],
            tied="vocabulary" if kinds[i] in TIED else None,
            tied_parameter_bytes=whole.parameters[i] if kinds[i] in TIED else 0,
        )
        for i, name in enumerate(_names(kinds))
    )
    profile = Profile(
        format="hetpipe.profile/1",
        model=options.model,
        layers=layers,
        measurements=tuple(_measurement(device, degree, row, kinds, options) for (device, degree), row in seconds.items()),
        # Mixed precision: float32 parameters and two moments beside 2-byte parameters and gradients are 12 of 16 bytes.
        optimizer=OptimizerProfile(state_bytes_per_parameter_byte=6.0 if options.number_bytes == 2 else 2.0),
        provenance={"source": f"FASOP, {folder.name}; bytes from the model's sizes", "backward_over_forward": BACKWARD},
    )
    return Imported(profile, given_cluster(options))


def _names(kinds: list[LayerKind]) -> list[str]:
    """Embeddings and the head by their kind, others numbered."""
    numbered, names = Counter[str](), []
    for i, kind in enumerate(kinds):
        several = kind not in ("embedding", "head")
        names.append(f"{kind}.{numbered[kind]}" if several else "decoder_embedding" if kind == "embedding" and i else kind)
        numbered[kind] += 1
    return names


def _of_kinds(three: GptBytes, kinds: list[LayerKind]) -> GptBytes:
    """Of layers of these kinds, from an embedding's, a block's and a head's; the last layer puts out a loss."""
    places = {"embedding": 0, "head": 2}
    rows = [[row[places.get(kind, 1)] for kind in kinds] for row in three]
    rows[2][-1] = three.outputs[2]
    return GptBytes(*map(tuple, rows))


def _measurement(device_type: str, degree: int, row: list[float], kinds: list[LayerKind], options: ImportOptions) -> Measurement:
    shard = _of_kinds(gpt_bytes(3, options, degree), kinds)
    sizes = SIZES if options.model in A100 else (1,)
    forward = [tuple(factor(options.model, device_type, kind, b) * t for kind, t in zip(kinds, row, strict=True)) for b in sizes]
    return Measurement(
        device_type=device_type,
        tensor_parallel=degree,
        microbatch_sizes=sizes,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(tuple(BACKWARD * t for t in times) for times in forward),
        optimizer_seconds=(0.0,) * len(row),  # FASOP leaves it out
        parameter_bytes=shard.parameters if degree > 1 else None,
        saved_bytes_per_sample=shard.saved if degree > 1 else None,
    )


def _read(folder: Path, model: str) -> dict[tuple[str, int], list[float]]:
    """(device type, degree) → forward seconds of each layer."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of MODEL_DEVICE_DEGREE.npy files")
    found, others = {}, set()
    for file in sorted(folder.glob("*.npy")):
        match = re.fullmatch(r"(.+)_([^_]+)_([0-9]+)", file.stem)
        if match is None or not int(match[3]):
            continue
        others.add(match[1])
        if match[1] == model:
            found[match[2], int(match[3])] = _array(file)
    if not found:
        known = nearest(model, sorted(others)) if others else "; there is no file MODEL_DEVICE_DEGREE.npy"
        raise InputError(f"{folder} has no model {model!r}{known}")
    return found


def _array(file: Path) -> list[float]:
    try:
        with file.open("rb") as content:
            array = np.lib.format.read_array(content, allow_pickle=False)
    except Exception as error:  # whatever NumPy says of a damaged file
        raise InputError(cut(f"{file} is not a NumPy array of numbers: {' '.join(str(error).split())}")) from None
    if array.ndim != 1 or array.dtype.kind not in "fiu" or len(array) > MOST_LAYERS:
        raise InputError(f"{file}: expected one row of numbers, at most {MOST_LAYERS}")
    return numbers([float(x) for x in array], str(file))
