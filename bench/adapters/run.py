"""Is what is predicted of adapters what is measured? Six kinds of decoder, each trained in full, with LoRA, and with LoRA over a
base in 4 bits, over two emulated devices, one half as fast, of which the slower has room for a part of the model only.

    python -m bench.adapters.run [--only qwen3,gemma2] [--regimes LoRA] [--readme]
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import typer
import yaml
from rich.console import Console

from bench.apart import said
from bench.tables import chosen, environment, markdown, replace_table
from hetpipe.cli.exits import main
from hetpipe.files.units import human_bytes

README = Path(__file__).parent / "README.md"
WORDS, LENGTH, SAMPLES, BATCH, STEPS = 512, 96, 160, 8, 14
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "mistral": {},
    "gemma2": {"query_pre_attn_scalar": 32, "head_dim": 32},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
}
REGIMES: dict[str, dict[str, Any] | None] = {"full": None, "LoRA": {"r": 8}, "nf4": {"r": 8, "base": "nf4"}}
MEMORY = {"full": "24 MiB", "LoRA": "12 MiB", "nf4": "8 MiB"}  # of the slower device
console = Console()


class Row(NamedTuple):
    """What one run came to."""

    kind: str
    regime: str
    plan: str
    step: tuple[float, float]  # predicted, measured
    peaks: dict[str, tuple[int, int]]
    valid: bool

    @property
    def step_error(self) -> float:
        """Measured over predicted, less one."""
        return self.step[1] / self.step[0] - 1

    @property
    def memory_error(self) -> float:
        """Of the device that is farthest off."""
        return max((there / said - 1 for said, there in self.peaks.values()), key=abs)


def train(kind: str, regime: str, folder: Path) -> Row:
    """One run in a folder of its own."""
    cluster = {
        "format": "hetpipe.cluster/1",
        "link": {"bandwidth": "1 GB/s"},
        "device_types": {
            "fast": {"memory": "96 MiB", "emulate": {"slowdown": 6.0}},
            "slow": {"memory": MEMORY[regime], "emulate": {"slowdown": 12.0}},
        },
        "nodes": [{"name": "n0", "devices": {"fast": 1, "slow": 1}}],
    }
    job = {
        "format": "hetpipe.job/1",
        "model": {"name": "causal_lm", "args": {"type": kind, "extras": [], **SIZES, **KINDS[kind]}},
        "data": {"target": "bench.causal_lms.jobs:tokens", "args": {"words": WORDS, "samples": SAMPLES, "length": LENGTH}},
        "loss": {"name": "cross_entropy", "weight": "tokens"},
        "cluster": "cluster.yaml",
        "profiler": {"microbatch_sizes": [1, 2, 4], "cache": str(folder / "cache")},
        "train": {"global_batch": BATCH, "steps": STEPS},
        "log": {"folder": "log"},
    }
    if (adapter := REGIMES[regime]) is not None:
        job["adapter"] = adapter
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    said(["-m", "hetpipe", "train", "job.yaml"], folder=folder)
    summary, plan = (json.loads((folder / "log" / name).read_text()) for name in ("summary.json", "plan.json"))
    predicted = plan["predicted"]["peak_bytes"]
    cuts = " beside ".join(
        " + ".join(f"{s['layers'][1] - s['layers'][0]} on {'fast' if s['devices'][0] == 'n0/0' else 'slow'}" for s in r["stages"])
        for r in plan["replicas"]
    )
    return Row(
        kind,
        regime,
        cuts,
        (plan["predicted"]["step_seconds"], summary["measured_step_seconds"]),
        {device: (predicted[device], there) for device, there in summary["peak_bytes"].items()},
        summary["overrun_fraction"] <= 0.01,
    )


def table(rows: Sequence[Row]) -> str:
    """A row a run."""
    lines = [
        [
            row.kind,
            row.regime,
            row.plan,
            f"{row.step[0]:.2f} s",
            f"{row.step_error:+.1%}" + ("" if row.valid else " (overran)"),
            " / ".join(human_bytes(said) for said, _ in row.peaks.values()),
            f"{row.memory_error:+.1%}",
        ]
        for row in rows
    ]
    header = ["type", "trained", "layers", "step, predicted", "measured", "peak memory, predicted", "measured, the farther off"]
    return markdown(header, lines, words=3)


def bench(
    only: Annotated[str, typer.Option(help="Types, with commas between.")] = ",".join(KINDS),
    regimes: Annotated[str, typer.Option(help="full, LoRA, nf4.")] = ",".join(REGIMES),
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Train each, and tell predicted and measured."""
    rows, where = [], environment()
    kinds, trained = chosen("--only", only, list(KINDS)), chosen("--regimes", regimes, list(REGIMES))
    for kind in kinds:
        for regime in trained:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(train(kind, regime, Path(folder)))
            console.print(table(rows[-1:]).splitlines()[-1], markup=False, soft_wrap=True)
    text = f"{where}\n\n{table(rows)}"
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "prediction", text)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
