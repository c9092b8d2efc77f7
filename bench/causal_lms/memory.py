"""A folder of 1.5 billion random parameters on four ranks: what does each hold when it has loaded its layers, and how long does
that take?

    python -m bench.causal_lms.memory [--folder FOLDER] [--readme]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

import hetpipe
from bench.tables import markdown, replace_table
from hetpipe.cli.exits import main
from hetpipe.hf.folder import INDEX
from hetpipe.layers.device import module_bytes
from hetpipe.layers.model import cross_entropy
from hetpipe.planning import registry
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.world import connect
from hetpipe.spec.cluster import Cluster

README = Path(__file__).parent / "README.md"
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
CUTS = ([0, 5], [5, 14], [14, 23], [23, 30])  # of the embedding, 28 blocks and the head; the first and the last share the table
SHARD_BYTES = 1 << 30
TOKENS = 64
console = Console()


class Loaded(NamedTuple):
    """What one rank came to. Bytes are anonymous memory of the process, of which no page can be given back; `sums_bytes`: of the
    gradients that it sums with other ranks, which are there from the start."""

    layers: Sequence[int]
    own_bytes: int
    sums_bytes: int
    before_bytes: int
    after_bytes: int
    peak_bytes: int
    build_seconds: float
    load_seconds: float


def write_folder(folder: Path, kind: str, sizes: Mapping[str, Any]) -> int:
    """A folder of save_pretrained's kind, in bfloat16, a shard at a time; its parameters."""
    config: Any = transformers.CONFIG_MAPPING[kind](**sizes)
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = classes[type(config)]
    config.architectures, config.dtype = [model_class.__name__], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = model_class(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    where, shard, count = dict[str, str](), dict[str, Tensor](), 0

    def write() -> None:
        file = f"model-{len(set(where.values())):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    with Activity("writing random weights", len(shapes)) as activity:
        for name, shape in shapes.items():
            shard[name] = torch.randn(shape).mul_(0.02).bfloat16()
            count += shard[name].numel()
            activity.advance()
            if sum(t.numel() * 2 for t in shard.values()) > SHARD_BYTES:
                write()
        write()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 2 * count}, "weight_map": where}))
    return count


def load(folder: str, cuts: Sequence[Sequence[int]], adapter: Mapping[str, Any] | None = None) -> Loaded:
    """This rank's part, with adapters, if there are any."""
    torch.set_num_threads(1)
    connect(use_cuda=False)
    build = registry.model("causal_lm")  # and with it transformers
    before, began = _bytes("RssAnon"), time.perf_counter()
    model = build(weights=folder)
    if adapter is not None:
        model = hetpipe.adapt(model, seed=0, **adapter)
    built = time.perf_counter()
    stages = [{"layers": layers, "devices": [f"n0/{rank}"]} for rank, layers in enumerate(cuts)]
    replica = {"microbatch_sizes": [1] * 4, "stages": stages}
    plan = hetpipe.Plan.parse({"model": "bench", "global_batch": 4, "replicas": [replica]}, "this bench")
    engine = hetpipe.wrap(model, plan, torch.zeros(1, TOKENS, dtype=torch.int64), cross_entropy, loss_weight="tokens")
    loaded, after = time.perf_counter(), _bytes("RssAnon")
    sums = sum(b.summed.nbytes for b in engine.sync._buckets if b.summed is not None)
    found = Loaded(
        cuts[engine.index], sum(module_bytes(engine.stage)), sums, before, after, _bytes("VmHWM"), built - began, loaded - built
    )
    engine.leave()
    return found


def _bytes(key: str) -> int:
    """Of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def table(found: Sequence[Loaded]) -> str:
    """A row a rank."""
    rows = []
    for rank, one in enumerate(found):
        held = one.after_bytes - one.before_bytes
        own = one.own_bytes + one.sums_bytes
        sizes = (one.own_bytes, one.sums_bytes, held)
        rows.append(
            [
                str(rank),
                str(list(one.layers)),
                *map(_mib, sizes),
                f"{held / own - 1:+.1%}",
                _mib(one.peak_bytes),
                f"{one.build_seconds:.1f}",
                f"{one.load_seconds:.1f}",
            ]
        )
    header = [
        "rank",
        "layers",
        "its layers, MiB",
        "room for sums of gradients, MiB",
        "held more than before, MiB",
        "beside both",
        "most of all memory at any time, MiB",
        "seconds to build",
        "seconds to load",
    ]
    return markdown(header, rows, words=2)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def loaded(
    folder: Path | None,
    kind: str,
    sizes: Mapping[str, Any],
    cuts: Sequence[Sequence[int]],
    adapter: Mapping[str, Any] | None = None,
) -> list[Loaded]:
    """Write the folder, if it is not there, and load it on a rank for each part."""
    with tempfile.TemporaryDirectory() as own:
        where = folder if folder is not None else Path(own)
        if not (where / INDEX).exists():
            where.mkdir(parents=True, exist_ok=True)
            write_folder(where, kind, sizes)
        cluster: Any = {
            "format": "hetpipe.cluster/1",
            "device_types": {"cpu": {"memory": "8 GiB"}},
            "nodes": [{"name": "n0", "devices": {"cpu": len(cuts)}}],
        }
        return start_ranks(load, (str(where), cuts, adapter), Cluster.parse(cluster, "this bench").devices)


def bench(
    folder: Annotated[Path | None, typer.Option(help="Where the weights are, or are to be written (3 GB).")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Write the folder, load it on four ranks, and tell what each holds."""
    text = table(loaded(folder, "qwen2", QWEN, CUTS))
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "memory", text)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
