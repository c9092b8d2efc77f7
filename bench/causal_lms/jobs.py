"""Twelve kinds of decoder as people train them: over unequal stages and replicas, killed, gone on under another plan, exported,
and loaded by transformers. Is the end that of transformers' own model in a plain loop on one device?

    python -m bench.causal_lms.jobs [--only qwen3,gemma2] [--readme]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import typer
import yaml
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from bench.apart import ROOT, said
from bench.tables import chosen, markdown, replace_table
from hetpipe.building.data import EpochSampler, fetch
from hetpipe.building.datasets import DataSplits
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.cli.exits import main
from hetpipe.hf.replay.tiny import WORDS, tiny

README = Path(__file__).parent / "README.md"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama 3",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen 2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen 3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen-MoE", {}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", {}),
    "phi3": ("Phi 3", {}),
    "olmo2": ("OLMo 2", {}),
    "deepseek_v3": ("DeepSeek V3", {}),
    "gpt_neox": ("GPT-NeoX", {}),
}
SAMPLES, LENGTH, BATCH, STEPS, KILLED = 30, 12, 7, 5, 3  # the run is killed when it has saved after step KILLED
PATIENCE_SECONDS = 180.0
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
# Three stages beside one, then one beside two: which layers each has of the embedding, a few blocks and the head (-1: up to
# the head, END: with it).
END = 0
PLANS = (
    [
        {"sizes": [2, 1, 2], "stages": [([0, 2], "n0/0"), ([2, -1], "n0/1"), ([-1, END], "n0/2")]},
        {"sizes": [2], "stages": [([0, END], "n1/0")]},
    ],
    [{"sizes": [1, 2], "stages": [([0, END], "n0/1")]}, {"sizes": [2, 2], "stages": [([0, 3], "n1/0"), ([3, END], "n0/2")]}],
)
console = Console()


def tokens(words: int = WORDS, samples: int = SAMPLES, length: int = LENGTH) -> DataSplits:
    """Random tokens, of each of which the next is to be told."""
    drawn = torch.randint(3, words, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    pairs: Any = TensorDataset(drawn[:, :-1], drawn[:, 1:])
    return DataSplits(train=pairs)


class Trial:
    """One kind of model in a folder of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.start = kind, folder, folder / "start"
        config: Any = transformers.CONFIG_MAPPING[kind]
        classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        self.model_class = classes[config]
        torch.manual_seed(0)
        small = tiny(self.model_class, config(**KINDS[kind][1]))
        self.layers = small.num_hidden_layers + 2
        self.model_class(small).save_pretrained(self.start)
        self._write(
            "cluster.yaml",
            {
                "format": "hetpipe.cluster/1",
                "device_types": {"cpu": {"memory": "1 GiB"}},
                "link": {"bandwidth": "1 GB/s"},
                "nodes": [{"name": "n0", "devices": {"cpu": 3}}, {"name": "n1", "devices": {"cpu": 1}}],
            },
        )
        self._write(
            "job.yaml",
            {
                "format": "hetpipe.job/1",
                "model": {"name": "causal_lm", "args": {"weights": "start"}},
                "data": {"target": "bench.causal_lms.jobs:tokens"},
                "cluster": "cluster.yaml",
                "plan": {"file": "plan.json"},
                "loss": {"name": "cross_entropy", "weight": "tokens"},
                "profiler": {"microbatch_sizes": [1, 2], "repeats": 1},
                "train": {"global_batch": BATCH, "steps": STEPS, "dtype": "float64", "optimizer": {"name": "SGD", **SGD}},
                "checkpoint": {"folder": "saved", "every_steps": 1},
                "log": {"folder": "log"},
            },
        )

    def _write(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))

    def plan(self, replicas: Sequence[dict[str, Any]]) -> None:
        """Train by this plan from now on."""
        self._write(
            "plan.json",
            {
                "format": "hetpipe.plan/1",
                "model": "causal_lm",
                "global_batch": BATCH,
                "schedule": "1f1b",
                "replicas": [
                    {
                        "microbatch_sizes": r["sizes"],
                        "stages": [{"layers": self._range(*layers), "devices": [device]} for layers, device in r["stages"]],
                    }
                    for r in replicas
                ],
            },
        )

    def _range(self, begin: int, end: int) -> list[int]:
        return [begin if begin >= 0 else self.layers + begin, end if end > 0 else self.layers + end]

    def killed(self) -> int:
        """Train until a checkpoint is there, and kill all processes at once; the step of the newest checkpoint."""
        run = subprocess.Popen(
            [sys.executable, "-m", "hetpipe", "train", "job.yaml"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        saved = str(self.folder / "saved")
        until = time.monotonic() + PATIENCE_SECONDS
        while run.poll() is None and time.monotonic() < until and len(list_checkpoints(saved)) < KILLED:
            time.sleep(0.01)
        if run.poll() is not None:
            raise RuntimeError(f"{self.kind}: the run has ended before it was killed: {run.communicate()[0][-2000:]}")
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        return len(list_checkpoints(saved))

    def reference(self) -> Any:
        """Transformers' own model after the steps on one device, in a plain loop."""
        model = self.model_class.from_pretrained(self.start, dtype=torch.float64)
        with contextlib.suppress(ValueError):  # a model without experts; those of others have no product in float64 but this
            model.set_experts_implementation("eager")
        optimizer, data = torch.optim.SGD(model.parameters(), **SGD), tokens().train
        batches = EpochSampler(SAMPLES, BATCH, seed=0).forever()
        model.train()
        for _ in range(STEPS):
            inputs, targets = fetch(data, next(batches))
            optimizer.zero_grad()
            logits = model(input_ids=inputs, use_cache=False).logits
            nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).backward()
            optimizer.step()
        return model


def tried(kind: str) -> list[str]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(kind, Path(name))
        trial.plan(PLANS[0])
        at = trial.killed()
        trial.plan(PLANS[1])
        said(["-m", "hetpipe", "train", "job.yaml"], folder=trial.folder)
        said(["-m", "hetpipe", "export-weights", "job.yaml", "-o", "trained"], folder=trial.folder)
        found, loading = trial.model_class.from_pretrained(Path(name) / "trained", dtype=torch.float64, output_loading_info=True)
        wanted, before = trial.reference(), trial.model_class.from_pretrained(trial.start, dtype=torch.float64)
    own, moved = dict(found.named_parameters()), 0.0
    with torch.no_grad():
        for key, value in before.named_parameters():
            moved = max(moved, float((wanted.get_parameter(key) - value).abs().max()))
        error = max(float((own[key] - value).abs().max()) for key, value in wanted.named_parameters())
    strange = sum(len(keys) for keys in loading.values())
    return [KINDS[kind][0], f"`{kind}`", f"{at} of {STEPS}", f"{moved:.2g}", f"{error:.1e}", str(strange)]


def bench(
    only: Annotated[str, typer.Option(help="Types, with commas between them.")] = ",".join(KINDS),
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Train, kill, go on under another plan, export, load, and compare."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names, rows = chosen("--only", only, list(KINDS)), []
    for name in names:
        rows.append(tried(name))
        console.print(*rows[-1], markup=False)
    header = [
        "model",
        "type",
        "killed after step",
        "a parameter moved by at most",
        "off from one device by at most",
        "keys missing or unexpected",
    ]
    text = markdown(header, rows, words=2)
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "jobs", text)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
