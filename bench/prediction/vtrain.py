"""Measured runs by other authors, predicted from layers that still others measured: nothing here is fitted.

The runs: 87 of Megatron-style GPTs on one node of 8 A100 (github.com/VIA-Research/vTrain at commit f8dda847,
data/ground_truth_single.csv; Bang et al., "vTrain: A Simulation Framework for Evaluating Cost-effective and Compute-optimal Large
Language Model Training", MICRO '24, arXiv 2312.12391): of the first 390 lines all with a hidden size of 2048 and without tensor
parallelism. Their configurations (config/validation/single) say 1F1B, every layer recomputed, and 150 GB/s inside the node.

The layers: Zorse's `deepspeedllama_tiny` on an A100 of 40 GB in fp16, with 1,024 tokens and the same hidden size, whose layer has
51.4 million parameters where a GPT's of this size has 50.4 million."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Array
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.predict.simulator import simulate

# devices, global batch, micro-batch, blocks, replicas, stages, milliseconds of an iteration
ROWS = """
4 16 4 24 2 2 410.490577   4 32 2 16 4 1 406.355066   4 16 2 24 4 1 304.165703   4 8 1 16 4 1 152.151529
8 32 2 24 2 4 478.316661   8 64 4 16 4 2 511.957199   4 32 1 12 2 2 511.71286    8 16 2 12 2 4 185.697557
2 8 1 16 2 1 278.510803    8 128 4 20 8 1 877.614558  8 32 2 24 8 1 303.755986   8 8 1 20 2 4 168.453316
8 64 8 24 4 2 752.708528   8 64 1 24 4 2 849.693819   4 16 4 12 2 2 243.775097   4 2 1 16 1 4 94.145458
2 32 8 16 2 1 689.778378   4 2 1 12 1 4 76.948466     4 64 1 16 4 1 1029.244823  4 8 1 24 1 4 308.133608
4 8 1 16 2 2 187.895612    8 32 1 24 8 1 392.115771   8 32 4 20 4 2 354.163077   4 16 4 16 1 4 367.350369
8 64 2 12 8 1 324.224592   8 64 4 20 8 1 454.973072   8 128 1 12 8 1 816.114145  4 16 1 12 4 1 219.915319
8 16 1 20 2 4 275.236048   4 64 2 16 4 1 785.970714   8 16 2 16 2 4 220.536469   2 4 2 20 1 2 193.448269
4 4 2 16 1 4 142.300869    4 2 1 24 1 4 128.539442    4 64 8 16 4 1 688.718146   4 16 4 16 2 2 299.490591
4 32 2 24 4 1 570.150663   2 32 1 16 2 1 1030.305055  8 32 1 20 2 4 488.801512   8 64 8 12 4 2 452.570593
4 4 1 16 2 2 115.084178    4 16 8 24 1 4 652.781365   8 32 4 16 2 4 403.781711   4 16 8 20 1 4 570.186829
2 16 2 20 1 2 589.896325   4 32 1 16 2 2 624.764216   8 32 1 16 4 2 335.24868    8 4 1 12 2 4 79.662266
2 4 1 20 1 2 217.101996    2 8 2 24 1 2 375.220561    4 16 2 20 2 2 331.356111   4 64 1 20 4 1 1242.145031
8 64 2 24 4 2 683.576524   8 32 4 20 2 4 466.787192   4 8 4 20 1 4 305.03511     4 8 2 12 2 2 136.501457
8 8 1 16 4 2 116.814378    4 64 8 12 4 1 552.450378   4 16 1 20 2 2 394.376778   2 16 4 16 1 2 505.039399
8 32 1 24 2 4 551.802996   2 32 2 12 2 1 628.747597   4 16 1 16 2 2 333.51848    8 64 1 16 8 1 527.755546
2 2 1 20 1 2 131.34385     4 8 1 20 1 4 271.516548    2 4 2 12 1 2 132.290957    4 32 8 12 2 2 451.187493
8 32 2 16 2 4 370.569469   2 16 1 20 1 2 731.650872   4 8 2 16 2 2 168.057213    8 64 2 12 4 2 420.066909
4 32 1 20 4 1 637.375167   8 32 4 12 2 4 340.77133    4 2 1 20 1 4 111.34245     2 32 8 24 2 1 962.740116
4 8 2 12 1 4 182.983757    2 32 4 24 2 1 1025.754737  2 4 1 20 2 1 185.06917     2 8 4 20 1 2 349.041385
8 16 2 12 4 2 137.884557   8 32 1 24 4 2 454.874387   2 2 1 16 1 2 109.896578    8 128 2 12 8 1 627.663104
2 16 1 12 1 2 507.50236    4 32 4 20 2 2 600.672167   2 16 8 12 1 2 446.976993
"""
MODEL, GPU, TOKENS, HEADS, VOCABULARY = "deepspeedllama_tiny", "a100x40", 1024, 16, 51200  # Megatron's padded vocabulary of GPT-2
INSIDE_BYTES_PER_SECOND = 150e9  # vTrain's configurations
HBM2_BYTES_PER_SECOND = 1555e9  # NVIDIA's data sheet of the A100 with 40 GB
# Adam in mixed precision moves 28 bytes a parameter: reads and writes of the float32 parameter and two moments, the read of a
# gradient and the write of a parameter in 2 bytes.
ADAM_BYTES_PER_PARAMETER_BYTE = 14.0


class VtrainRun(NamedTuple):
    """One line of the published table."""

    devices: int
    global_batch: int
    microbatch: int
    blocks: int
    replicas: int
    stages: int
    seconds: float

    @property
    def name(self) -> str:
        """`8 devices, pp 2 dp 4, 24 blocks, batch 64/8`."""
        grid = f"pp {self.stages} dp {self.replicas}"
        return f"{self.devices} devices, {grid}, {self.blocks} blocks, batch {self.global_batch}/{self.microbatch}"

    def plan(self) -> Plan:
        """Equal blocks a stage, every layer recomputed; the first stage has the embedding, too, the last the head."""
        each = self.blocks // self.stages
        cuts = [0, *(1 + each * (s + 1) for s in range(self.stages - 1)), self.blocks + 2]
        sizes = (self.microbatch,) * (self.global_batch // self.replicas // self.microbatch)
        replicas = tuple(
            ReplicaPlan(
                microbatch_sizes=sizes,
                stages=tuple(
                    StagePlan(layers=(cuts[s], cuts[s + 1]), devices=(f"node/{s * self.replicas + r}",), recompute=True)
                    for s in range(self.stages)
                ),
            )
            for r in range(self.replicas)
        )
        return Plan(model=MODEL, global_batch=self.global_batch, replicas=replicas, precision={GPU: "fp16"})


def vtrain_runs() -> list[VtrainRun]:
    """All rows."""
    numbers = ROWS.split()
    found = []
    for i in range(0, len(numbers), 7):
        devices, batch, microbatch, blocks, replicas, stages = map(int, numbers[i : i + 6])
        found.append(VtrainRun(devices, batch, microbatch, blocks, replicas, stages, float(numbers[i + 6]) / 1e3))
    return found


def priced(run: VtrainRun, profile: Profile) -> dict[str, Any]:
    """Predicted against measured, with the defaults of everything but the profile and the links."""
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {GPU: {"memory": "40 GB"}},
        "nodes": [{"name": "node", "devices": {GPU: 8}, "link": {"bandwidth": INSIDE_BYTES_PER_SECOND}}],
    }
    timeline = simulate(run.plan(), profile, Cluster.parse(document, "vTrain's node"))
    return {
        "run": run.name,
        "microbatch": run.microbatch,
        "measured_seconds": run.seconds,
        "predicted_seconds": timeline.step_seconds,
        "pipeline_seconds": timeline.pipeline_seconds,
        "gradient_sync_seconds": timeline.sync_seconds,
        "optimizer_seconds": timeline.optimizer_seconds,
        "time_error": timeline.step_seconds / run.seconds - 1,
    }


def predict_from_zorse(folder: Path) -> list[dict[str, Any]]:
    """Each run from the layer in Zorse's data, which lies in `folder`."""
    layer = zorse_layer(folder)
    return [priced(run, with_blocks(layer, run.blocks)) for run in vtrain_runs()]


def predict_pipelines(folder: Path) -> list[dict[str, Any]]:
    """Each run that has a pipeline, from a layer whose seconds come from the runs that have none: see `own_layer`."""
    layer = own_layer(zorse_layer(folder))
    return [priced(run, with_blocks(layer, run.blocks)) for run in vtrain_runs() if run.stages > 1]


def zorse_layer(folder: Path) -> Profile:
    """Zorse's measurement of embedding, one block and head, on the one GPU in fp16."""
    options = ImportOptions(model=MODEL, sequence_length=TOKENS, attention_heads=HEADS, vocabulary=49152, number_bytes=2)
    whole = import_published("zorse", [folder], options).profile.at({GPU: "fp16"})
    return _picked(whole.model_copy(update={"measurements": (whole.measurement(GPU),)}), [0, 1, -1])


def own_layer(layer: Profile) -> Profile:
    """The same with vTrain's seconds: at each micro-batch size those of a block and of the head that come nearest to all runs
    without a pipeline (least squares, none negative), less what is predicted of gradient sums and optimizer. Forward and
    backward have the parts that they have in `layer`."""
    m, rows = layer.measurement(GPU), dict[int, tuple[Array, Array]]()
    sizes = sorted({run.microbatch for run in vtrain_runs()})
    for b in sizes:
        runs = [run for run in vtrain_runs() if run.stages == 1 and run.microbatch == b]
        counts = [run.global_batch // run.replicas // b for run in runs]
        rest = [priced(run, with_blocks(layer, run.blocks)) for run in runs]
        left = [run.seconds - x["gradient_sync_seconds"] - x["optimizer_seconds"] for run, x in zip(runs, rest, strict=True)]
        found, _ = nnls(np.array([[n * run.blocks, n] for n, run in zip(counts, runs, strict=True)]), np.array(left))
        forward, backward = m.times(b)
        scale = np.array([0.0, *found]) / np.maximum(2 * forward + backward, 1e-12)  # every layer is recomputed
        rows[b] = scale * forward, scale * backward
    times = {
        "microbatch_sizes": tuple(sizes),
        "forward_seconds": tuple(tuple(rows[b][0].tolist()) for b in sizes),
        "backward_seconds": tuple(tuple(rows[b][1].tolist()) for b in sizes),
    }
    changed = m.model_copy(update=times)
    return layer.model_copy(update={"measurements": (changed,)})


def with_blocks(layer: Profile, blocks: int) -> Profile:
    """Embedding, so many blocks and head, with Adam's time by the bytes that it moves."""
    found = _picked(layer, [0, *[1] * blocks, 2])
    adam = tuple(ADAM_BYTES_PER_PARAMETER_BYTE * x.parameter_bytes / HBM2_BYTES_PER_SECOND for x in found.layers)
    m = found.measurement(GPU).model_copy(update={"optimizer_seconds": adam})
    return found.model_copy(update={"measurements": (m,)})


def _picked(profile: Profile, which: list[int]) -> Profile:
    """A profile of these layers of another."""
    m = profile.measurement(GPU)

    def row(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values[i] for i in which)

    columns = {
        "forward_seconds": tuple(row(times) for times in m.forward_seconds),
        "backward_seconds": tuple(row(times) for times in m.backward_seconds),
        "optimizer_seconds": row(m.optimizer_seconds),
        "saved_bytes_per_sample": row(m.saved_bytes_per_sample),
    }
    kept = m.model_copy(update=columns)
    layers = tuple(profile.layers[i].model_copy(update={"name": f"layer.{n}"}) for n, i in enumerate(which))
    return profile.model_copy(update={"layers": layers, "measurements": (kept,)})
