"""Losses over preferences beside trl's own trainers: the same model, tokens and steps on one device, in float64."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from hetpipe.building.build import build_data
from hetpipe.building.data import EpochSampler
from hetpipe.documents.job import Job
from tests.support.chats import lines
from tests.support.finetuning import exact_model
from tests.support.jobs import Folder, train
from tests.support.runs import trained
from tests.test_preferences import PLANS, records

import transformers  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # trl's and transformers' own warn of each other

STEPS, RATE, BATCH = 3, 0.5, 6


def job_of(place: Path, base: str, loss: dict[str, Any], pairs: list[dict[str, Any]], **args: Any) -> Path:
    place.mkdir()
    args = {"file": lines(place / "preferences.jsonl", pairs), "tokenizer": base, "test_fraction": 0, **args}
    return Folder(place).ready(
        (2, 1),
        PLANS["unequal replicas"],
        model={"name": "causal_lm", "args": {"weights": base}},
        data={"name": "preferences", "args": args},
        loss=loss,
        train=train(global_batch=BATCH, steps=STEPS, scheduler=None, clip_norm=None, optimizer={"name": "SGD", "lr": RATE}),
        checkpoint={"folder": str(place / "saved")},
        export={"folder": str(place / "exported")},
    )


def full_rows(data: Any, number: int) -> list[tuple[list[int], int]]:
    """Of both answers: the tokens up to the last that is learned, and how many are before the first that is."""
    (tokens, labels, *others), _ = data[number]
    found = []
    for own, wanted in ((tokens, labels), tuple(others)):
        learned = (wanted != -100).nonzero().flatten()
        row = [int(own[0]), *own[1:].tolist(), -1]
        row[1:] = [at if at != -100 else known for at, known in zip(wanted.tolist(), row[1:], strict=True)]
        found.append((row[: int(learned[-1]) + 2], int(learned[0]) + 1))
    return found


class Theirs:
    """One of trl's trainers, with a model of its own of this `kind` on one device. It takes `together` of a step's samples at
    once."""

    kind, together = "GPT2LMHeadModel", BATCH

    def __init__(self, base: str, place: Path, kind: Any, config: Any, **more: Any) -> None:
        import datasets

        datasets.disable_progress_bars()
        args = config(output_dir=str(place), use_cpu=True, report_to=[], bf16=False, **more)
        words = transformers.AutoTokenizer.from_pretrained(base)
        examples = datasets.Dataset.from_list([{"prompt": "Hello!", "chosen": "Yes.", "rejected": "No."}])
        self.model = self.load(base).train()
        own = {"ref_model": self.load(base)} if "ref_model" in inspect.signature(kind).parameters else {}
        self.trainer = kind(model=self.model, args=args, train_dataset=examples, processing_class=words, **own)

    def load(self, base: str) -> Any:
        model = getattr(transformers, self.kind).from_pretrained(base, dtype=torch.float64)
        model.config.pad_token_id = 0
        return model

    def steps(self, data: Any) -> tuple[list[float], dict[str, Tensor]]:
        """The loss of each step, and the parameters behind the last."""
        losses, optimizer = list[float](), torch.optim.SGD(self.model.parameters(), lr=RATE)
        batches = EpochSampler(len(data), BATCH, seed=0).forever()
        for _ in range(STEPS):
            parts = next(batches).split(self.together)
            loss = torch.stack([self.loss(self.batch(data, part.tolist())) for part in parts]).mean()
            assert loss.dtype == torch.float64
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses, {name: own.detach() for name, own in self.model.named_parameters()}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.trainer.compute_loss(self.model, batch)  # type: ignore[no-any-return]

    def batch(self, data: Any, numbers: list[int]) -> dict[str, Tensor]:
        """Padded by the trainer's own collator."""
        examples = []
        for number in numbers:
            (better, begin), (worse, same) = full_rows(data, number)
            assert (begin, better[:begin]) == (same, worse[:begin])
            examples.append(self.example(better[:begin], better[begin:], worse[begin:]))
        return self.trainer.data_collator(examples)  # type: ignore[no-any-return]

    def example(self, prompt: list[int], better: list[int], worse: list[int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, answer in (("chosen", better), ("rejected", worse)):
            found |= {f"{name}_input_ids": prompt + answer, f"{name}_attention_mask": [1] * len(prompt + answer)}
            found |= {f"{name}_labels": [-100] * len(prompt) + answer}
        return found


class Dpo(Theirs):
    """Its own head computes in float32, whatever the model's type; here a plain one does."""

    def __init__(self, base: str, place: Path) -> None:
        trl = pytest.importorskip("trl")
        super().__init__(base, place, trl.DPOTrainer, trl.DPOConfig, beta=0.3)
        self.trainer.ref_model = with_head(self.load(base))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.trainer.compute_loss(with_head(self.model), batch)  # type: ignore[no-any-return]

    def example(self, prompt: list[int], better: list[int], worse: list[int]) -> dict[str, Any]:
        return {"prompt_ids": prompt, "chosen_ids": better, "rejected_ids": worse}


def with_head(model: Any) -> Callable[..., Any]:
    def forward(labels: Tensor, fused_lm_head: bool, **given: Any) -> SimpleNamespace:
        logits, wanted = model(**given).logits[:, :-1], labels[:, 1:]
        found = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None]).squeeze(-1) * (wanted != -100)
        shown = dict.fromkeys(("entropy", "mean_logits"), found.detach())  # which no loss is made of
        return SimpleNamespace(log_probs=found, is_top1=found > 0, **shown)

    return forward


class SimPo(Theirs):
    def __init__(self, base: str, place: Path) -> None:
        cpo = pytest.importorskip("trl.experimental.cpo")
        super().__init__(base, place, cpo.CPOTrainer, cpo.CPOConfig, loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.3)


class Orpo(Theirs):
    """Its likelihood is the mean over all tokens of a batch, those of the question among them: a sample's own, as ours is, for
    one pair of which the question is one token. It rounds the odds to float32; here they stay."""

    together = 1

    def __init__(self, base: str, place: Path) -> None:
        own = pytest.importorskip("trl.experimental.orpo")
        super().__init__(base, place, own.ORPOTrainer, own.ORPOConfig, beta=0.3)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            return super().loss(batch)


class Reward(Theirs):
    kind = "GPT2ForSequenceClassification"

    def __init__(self, base: str, place: Path) -> None:
        trl = pytest.importorskip("trl")
        super().__init__(base, place, trl.RewardTrainer, trl.RewardConfig)

    def batch(self, data: Any, numbers: list[int]) -> dict[str, Tensor]:
        both = [data[number][0] for number in numbers]
        examples = [{"chosen_ids": better.tolist(), "rejected_ids": worse.tolist()} for better, _, worse, _ in both]
        return self.trainer.data_collator(examples)  # type: ignore[no-any-return]


SHORT = [{**record, "prompt": ".:?!,"[i % 5]} for i, record in enumerate(records())]


@pytest.mark.parametrize(
    ("theirs", "loss", "pairs", "args"),
    [
        (Dpo, {"name": "dpo", "beta": 0.3}, records(), {}),
        pytest.param(SimPo, {"name": "simpo", "beta": 2.0, "gamma": 0.3}, records(), {}, marks=pytest.mark.thorough),
        pytest.param(Orpo, {"name": "orpo", "beta": 0.3}, SHORT, {"template": "none"}, marks=pytest.mark.thorough),
        (Reward, {"name": "reward"}, records(), {}),
    ],
    ids=["dpo", "simpo", "orpo", "reward"],
)
def test_losses_and_gradients_are_those_of_trl(
    theirs: Any, loss: dict[str, Any], pairs: list[dict[str, Any]], args: dict[str, Any], tmp_path: Path
) -> None:
    """By a pipeline of two devices beside a single one, which take unequal parts of each step."""
    base = exact_model(tmp_path / "base", theirs.kind)
    file, exported = job_of(tmp_path / "ours", base, loss, pairs, **args), tmp_path / "ours" / "exported"
    data = build_data(Job.read(file)).train
    their = theirs(base, tmp_path / "theirs")
    losses, weights = their.steps(data)
    found = trained(file)
    assert found.losses == pytest.approx(losses, abs=1e-9)
    assert abs(losses[0] - losses[-1]) > 1e-6
    own = load_file(exported / "model.safetensors")
    assert own.keys() == weights.keys()
    for name, value in own.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-9 * RATE)
    if theirs is Reward:  # the folder gives the same scores, of rows that are padded
        model = transformers.AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float64)
        batch = {key: value for key, value in their.batch(data, [0, 1, 2]).items() if key != "use_cache"}
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, their.model(**batch).logits, rtol=0, atol=1e-9)
