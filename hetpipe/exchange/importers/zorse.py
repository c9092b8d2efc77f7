"""The published measurements of Zorse (Guo et al. 2025, arXiv 2507.10392, github.com/benson-guo/zorse) and Cephalo (ICS '25,
arXiv 2411.01075, github.com/benson-guo/cephalo) as a profile and a cluster.

A folder of model_latencies.json (model → GPU → tokens → dtype → a cell), model_stats.json (sizes of each model) and, where it is
there, cluster_info.json. A cell holds the milliseconds of ONE layer: two fitted lines [slope, intercept] over the samples, of
forward and backward; mostly also two lists of measured points, of 1, 2, 3, … samples. Older cells hold one line, or the slope
alone, of forward and backward together, of which a third is taken as forward.

- A model that model_stats.json lacks has the sizes of the one of its name with "deepspeed" before it: Cephalo's files have both
  implementations of a model.
- Points are taken as they are; where there is a line only, at 1, 2, 4, 8 and 16 samples.
- The head is a matrix product of vocabulary × hidden size at the rate of the layer; the embedding takes no time. Parameters of
  the layer are published; of what is left of the total, vocabulary × hidden size are the head's, the rest the embedding's.
- Parameters, gradients and outputs are of `number_bytes` at every dtype (automatic mixed precision); what is saved is of the
  dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetpipe.documents.number_types import PRECISION_OF, Precision
from hetpipe.exchange.importers.options import LARGEST, Imported, ImportOptions, given_cluster, mapping, numbers
from hetpipe.exchange.importers.transformer import Cell, transformer_profile
from hetpipe.exchange.importers.zorse_cluster import zorse_cluster
from hetpipe.files.formats import read_mapping
from hetpipe.files.limits import MOST_LAYERS, MOST_WIDTH
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.hf.sizes import TransformerSizes

FORWARD = 1 / 3  # of cells that hold forward and backward together
LINE_SIZES = (1, 2, 4, 8, 16)
DTYPES: dict[str, Precision] = {str(number_type): precision for number_type, precision in PRECISION_OF.items()}


def import_zorse(folder: Path, options: ImportOptions) -> Imported:
    """The profile of `options.model` at `options.sequence_length` tokens on every GPU and dtype that was measured; the cluster of
    the options, else that of cluster_info.json."""
    options.require("Zorse", "sequence_length", "attention_heads", "vocabulary")
    where = "model_latencies.json"
    gpus = _choose(read_mapping(folder / where), options.model, where)
    model = read_sizes(_sizes(read_mapping(folder / "model_stats.json"), options.model), options)
    profile = transformer_profile(
        model,
        _cells(gpus, options),
        options,
        provenance={
            "source": f"Zorse (arXiv 2507.10392), {where}: {options.sequence_length} tokens; bytes from the model's sizes",
            "left_out": ["the optimizer's time", "communication", "other sequence lengths"],
        },
    )
    described = folder / "cluster_info.json"
    if options.nodes or not described.exists():
        return Imported(profile, given_cluster(options))
    return Imported(profile, zorse_cluster(described, options))


def _choose(document: Any, model: str, where: str) -> dict[str, Any]:
    models = mapping(document, where)
    if model not in models:
        raise InputError(f"{where} has no model {model!r}{nearest(model, list(models))}")
    return mapping(models, where, model)


def _sizes(document: Any, model: str) -> dict[str, Any]:
    where = "model_stats.json"
    other = f"deepspeed{model}"
    return _choose(document, other if model not in mapping(document, where) and other in document else model, where)


def read_sizes(stats: dict[str, Any], options: ImportOptions) -> TransformerSizes:
    """A model's sizes. InputError where its parameters do not hold the layers and a head of this vocabulary."""

    def count(key: str, most: float) -> int:
        value = stats.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            where = f"model_stats.json: {options.model}: {key}"
            raise InputError(f"{where}: expected a number from 1 to {most:g}, found {shown(value)}")
        return value

    hidden, layers = count("hidden_size", MOST_WIDTH), count("num_layers", MOST_LAYERS - 2)
    each, total = count("parameters_per_layer", LARGEST), count("total_parameters", LARGEST)
    head = options.vocabulary * hidden
    rest = total - layers * each - head
    if rest < 0:
        raise InputError(
            f"model_stats.json: {options.model} has {total} parameters, but {layers} layers of {each} and a head of "
            f"--vocabulary {options.vocabulary} x {hidden} are {total - rest}. Give the vocabulary with which the parameters "
            "were counted"
        )
    return TransformerSizes(hidden, layers, each, rest, head)


def _cells(gpus: dict[str, Any], options: ImportOptions) -> dict[tuple[str, Precision], Cell]:
    """(GPU, precision) → cell, of those measured with this many tokens."""
    tokens, found, others = str(options.sequence_length), {}, set[str]()
    for gpu, lengths in gpus.items():
        by_length = mapping(lengths, f"model_latencies.json: {gpu}")
        others |= by_length.keys()
        for dtype, cell in mapping(by_length.get(tokens, {}), f"model_latencies.json: {gpu}, {tokens} tokens").items():
            where = f"model_latencies.json: {gpu}, {tokens} tokens, {dtype}"
            if dtype not in DTYPES:
                raise InputError(f"{where}: unknown dtype{nearest(dtype, list(DTYPES))}")
            found[gpu, DTYPES[dtype]] = read_cell(cell, where)
    if not found:
        raise InputError(
            f"model_latencies.json: {options.model!r} was not measured with --sequence-length {tokens}, but with "
            f"{', '.join(sorted(others)) or 'none'}"
        )
    return found


def read_cell(cell: Any, where: str) -> Cell:
    """Seconds of one layer, from any of the forms of a cell.

    >>> read_cell([[2.0, 1.0], [4.0, 0.0], [3.0, 5.0], [4.5, 8.0]], "here")
    Cell(sizes=(1, 2), forward=(0.003, 0.005), backward=(0.0045, 0.008))
    """
    if isinstance(cell, list) and len(cell) == 4:
        forward, backward = (numbers(row, where) for row in cell[2:])
        if not forward or len(forward) != len(backward):
            raise InputError(f"{where}: {len(forward)} forward times and {len(backward)} backward times")
        sizes = tuple(range(1, len(forward) + 1))
        return Cell(sizes, tuple(t / 1e3 for t in forward), tuple(t / 1e3 for t in backward))
    if isinstance(cell, list) and len(cell) == 2 and isinstance(cell[0], list):
        return Cell(LINE_SIZES, _line(cell[0], where), _line(cell[1], where))
    both = _line(cell if isinstance(cell, list) else [cell, 0.0], where)
    return Cell(LINE_SIZES, tuple(FORWARD * t for t in both), tuple((1 - FORWARD) * t for t in both))


def _line(line: Any, where: str) -> tuple[float, ...]:
    """Seconds at `LINE_SIZES` of a line [slope, intercept] in milliseconds; where it is negative, the slope alone."""
    if (
        not isinstance(line, list)
        or len(line) != 2
        or not all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST for x in line)
        or not line[0] > 0
    ):
        raise InputError(
            f"{where}: expected milliseconds [slope, intercept], two of them (and two lists of measured times), or a number, "
            f"with a slope above 0; found {shown(line)}"
        )
    slope, intercept = line
    return tuple((slope * b + intercept if slope * b + intercept > 0 else slope * b) / 1e3 for b in LINE_SIZES)
