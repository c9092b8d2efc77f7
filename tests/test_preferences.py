"""Preferences: records, pairs that stay together, and the losses dpo and simpo under every plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetpipe import InputError
from hetpipe.building.build import build_data, build_layers, build_loss
from hetpipe.building.data import EpochSampler
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.hf.replay.classes import scoring
from hetpipe.language.conversations import chat, preferences
from hetpipe.language.preferred import Pairs
from hetpipe.layers.device import one_thread
from hetpipe.layers.losses.preference import dpo, orpo, reward, simpo
from hetpipe.layers.weights import materialise
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.world import World
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import Drift
from hetpipe.training.observers.records import StepRecord
from hetpipe.training.start import run_everywhere
from hetpipe.training.trainer import Trainer
from tests.support.chats import lines, refusal, tokenizer
from tests.support.finetuning import exact_model
from tests.support.jobs import Folder, train
from tests.support.runs import trained

import transformers  # isort: skip
from peft import PeftModel  # isort: skip

LAYERS = 4  # embedding, two layers, head
MODEL: dict[str, Any] = {
    "type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
PLANS: dict[str, list[dict[str, Any]]] = {
    "one device": [{"cuts": [4], "sizes": [6]}],
    "a pipeline": [{"cuts": [1, 3], "sizes": [1, 2, 3]}],
    "unequal replicas": [{"cuts": [2, 2], "sizes": [3, 1]}, {"cuts": [4], "sizes": [2]}],
}
ANSWERS = ("Yes. ", "No. ", "I am well, thank you. ", "A river. ")


def records(count: int = 20) -> list[dict[str, Any]]:
    """Answers of different lengths."""
    return [
        {
            "prompt": f"How are you? {i % 5}",
            "chosen": ANSWERS[i % 4] * (1 + i % 3),
            "rejected": ANSWERS[(i + 1) % 4] * (1 + i % 2),
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("words"))


def job_of(tmp_path: Path, words: str, plan: str, loss: dict[str, Any], **sections: Any) -> Path:
    file = lines(tmp_path / "preferences.jsonl", records())
    data = {"name": "preferences", "args": {"file": file, "tokenizer": words, "test_fraction": 0.2}}
    section = train(global_batch=6, steps=4, scheduler=None, clip_norm=None, optimizer={"name": "SGD", "lr": 0.5})
    model = {"name": "causal_lm", "args": {**MODEL, "vocab_size": 400}}
    sections = {"model": model, "loss": loss, "train": section, "evaluate": {"every_steps": 2}, **sections}
    return Folder(tmp_path).ready((2, 1), PLANS[plan], data=data, **sections)


def by_hand(file: Path, name: str, beta: float, gamma: float) -> list[float]:
    """The same steps on one device, of logits, without any of the product's losses."""
    job = Job.read(file)
    plain = yaml.safe_load(file.read_text())
    plain["loss"], plain["data"] = {"name": "cross_entropy"}, {"name": "text"}
    del plain["evaluate"]
    layers = build_layers(Job.parse(plain, "the test's"))
    materialise(layers)
    layers.double().train()
    data: Any = build_data(job).train

    def answers(both: Any) -> tuple[Tensor, Tensor]:
        """Log-probability, and number of tokens, of each answer."""
        found, counts = list[Tensor](), list[int]()
        for tokens, labels in (both[:2], both[2:]):
            logits = layers(tokens[None])[0].log_softmax(-1)
            known = labels != -100
            found.append(logits[known].gather(1, labels[known][:, None]).sum())
            counts.append(int(known.sum()))
        return torch.stack(found), torch.tensor(counts, dtype=torch.float64)

    losses, optimizer = list[float](), torch.optim.SGD(layers.parameters(), lr=0.5)
    with one_thread(torch.device("cpu")):
        with torch.no_grad():
            reference = [answers(data[i][0])[0] for i in range(len(data))]
        batches = EpochSampler(len(data), 6, seed=0).forever()
        for _ in range(4):
            each = []
            for number in next(batches).tolist():
                found, counts = answers(data[number][0])
                means, gained = found / counts, found - reference[number]
                odds = means.exp() / (1 - means.exp())
                lead = {
                    "dpo": beta * (gained[0] - gained[1]),
                    "simpo": beta * (means[0] - means[1]) - gamma,
                    "orpo": (odds[0] / odds[1]).log(),
                }[name]
                far = (1 + (-lead).exp()).log()
                each.append(beta * far - means[0] if name == "orpo" else far)
            loss = torch.stack(each).mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


LOSSES = {
    "dpo": ({"name": "dpo"}, 0.1, 0.0),
    "simpo": ({"name": "simpo", "beta": 2.0, "gamma": 0.3}, 2.0, 0.3),
    "orpo": ({"name": "orpo", "beta": 0.4}, 0.4, 0.0),
}
# Each loss by one plan, by turns; `make test-all` takes all plans.
BY_TURNS = [
    pytest.param(*numbers, plan, id=f"{name}-{plan}", marks=() if (turn - at) % len(PLANS) == 0 else pytest.mark.thorough)
    for at, (name, numbers) in enumerate(LOSSES.items())
    for turn, plan in enumerate(PLANS)
]


@pytest.mark.parametrize(("loss", "beta", "gamma", "plan"), BY_TURNS)
def test_losses_are_those_of_one_device_by_hand(
    loss: dict[str, Any], beta: float, gamma: float, plan: str, words: str, tmp_path: Path
) -> None:
    file = job_of(tmp_path, words, plan, loss)
    found, truth = trained(file), by_hand(file, loss["name"], beta, gamma)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(truth), rtol=0, atol=1e-9)
    if loss["name"] == "dpo":
        assert found.losses[0] == pytest.approx(math.log(2), abs=1e-12), "the model is its own reference at first"
        assert found.losses[-1] != pytest.approx(math.log(2), abs=1e-6)
    assert [record.step for record in found.evaluations] == [2, 4]
    assert all(record.accuracy is not None and record.samples == 4 for record in found.evaluations)


def test_with_adapters_the_reference_is_the_base(words: str, tmp_path: Path) -> None:
    """New adapters change nothing at first; under another plan the losses are the same."""
    found = []
    for plan in ("one device", "unequal replicas"):
        place = tmp_path / plan.replace(" ", "-")
        place.mkdir()
        adapter = {"kind": "lora", "r": 4, "alpha": 8, "dropout": 0.0}
        found.append(trained(job_of(place, words, plan, {"name": "dpo"}, adapter=adapter)).losses)
    assert found[0][0] == pytest.approx(math.log(2), abs=1e-12)
    assert found[0] == pytest.approx(found[1], abs=1e-9)
    assert found[0][3] < found[0][0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # that the score is drawn at random; and what peft has of transformers
def test_a_reward_model_by_adapters(words: str, tmp_path: Path) -> None:
    """The same under every plan; peft's own model, with what was exported, gives the scores of the best evaluation."""
    base = exact_model(tmp_path / "base")
    adapter = {"kind": "lora", "r": 4, "alpha": 8, "dropout": 0.0, "train_also": ["head"]}
    model = {"name": "causal_lm", "args": {"weights": base}}
    found = []
    for plan in PLANS:
        place = tmp_path / plan.replace(" ", "-")
        place.mkdir()
        kept = {"checkpoint": {"folder": str(place / "saved")}, "export": {"folder": str(place / "exported")}}
        file = job_of(place, words, plan, {"name": "reward", "gamma": 0.1}, adapter=adapter, model=model, **kept)
        found.append(trained(file))
    for other in found[1:]:
        torch.testing.assert_close(torch.tensor(other.losses), torch.tensor(found[0].losses), rtol=0, atol=1e-9)
        assert other.evaluations[-1].accuracy == found[0].evaluations[-1].accuracy
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float64)
    loaded, pairs = PeftModel.from_pretrained(whole, place / "exported").eval(), build_data(Job.read(file)).test
    assert isinstance(pairs, Pairs)
    with torch.no_grad():
        scores = torch.stack(
            [torch.stack([loaded(row[None]).logits[0, 0] for row in pairs[i][0][::2]]) for i in range(len(pairs))]
        )
    loss = reward(scores, torch.zeros(len(pairs), 2, 2), gamma=0.1)
    best = min(record.loss for record in found[-1].evaluations)  # of which the adapters are exported
    assert best == pytest.approx(float(loss), abs=1e-9)


def test_a_run_that_resumes_has_the_reference_that_it_began_with(words: str, tmp_path: Path) -> None:
    def run(name: str, *settings: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        saving = {"folder": str(tmp_path / name / "saved"), "every_steps": 2}
        return trained(job_of(tmp_path / name, words, "unequal replicas", {"name": "dpo"}, checkpoint=saving), *settings)

    truth = run("whole")
    first, second = run("parts", "train.steps=2"), run("parts")
    assert first.losses + second.losses == truth.losses
    with pytest.raises(RankFailure, match=r"says of other answers than those that are trained, or eva"):
        run("parts", "train.steps=6", "evaluate.data={args: {limit: 5}}")
    file = tmp_path / "parts" / "saved" / "reference.safetensors"
    kept = load_file(file)
    for other in ({k: v - 1 for k, v in kept.items()}, {k: v[:3].contiguous() for k, v in kept.items()}):
        save_file(other, file)
        with pytest.raises(RankFailure, match=r"reference.safetensors is not as this run has written it"):
            run("parts", "train.steps=6")
    file.unlink()
    with pytest.raises(RankFailure, match=r"reference.safetensors is missing, which holds what the reference says"):
        run("parts", "train.steps=6")


@pytest.mark.slow
def test_what_is_trained_may_be_what_is_evaluated(words: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, words, "one device", {"name": "dpo"})
    result = trained(job, "data.args.test_fraction=0", f"evaluate.data={{args: {{file: {tmp_path}/preferences.jsonl}}}}")
    assert len(result.losses) == 4


class OtherDevices:
    """From one device to three, in the midst of a run."""

    def __init__(self, plans: list[Plan]) -> None:
        self.legs = list(zip(plans, (2, 4), strict=True))

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        return next((Leg(plan, until) for plan, until in self.legs if until > event.step), None)

    def watch(self, record: StepRecord) -> None:
        return None

    def drifted(self, drift: Drift, world: World) -> None:
        return None


def over_legs(job: Job, plans: list[Plan]) -> Any:
    found = Trainer(job, OtherDevices(plans)).run()
    return found and (found.losses, [record.step for record in found.evaluations])


@pytest.mark.thorough
def test_devices_that_join_have_the_reference_that_the_run_began_with(words: str, tmp_path: Path) -> None:
    """It is not asked of the model as it is by then; and ranks that join do not wait for others which have it."""
    file = job_of(tmp_path, words, "unequal replicas", {"name": "dpo"})
    truth = trained(file)
    alone = Plan.load(Folder(tmp_path).plan(PLANS["one device"], name="alone.json", model="causal_lm"))
    losses, steps = run_everywhere(Job.read(file), over_legs, [alone, Plan.load(tmp_path / "plan.json")])
    assert losses == pytest.approx(truth.losses, abs=1e-9)
    assert steps == [record.step for record in truth.evaluations] == [2, 4]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hello!", "chosen": "Yes.", "rejected": "No."},
        {"question": "Hello!", "chosen": "Yes.", "rejected": "No."},
        {"instruction": "Hello!", "chosen": "Yes.", "rejected": "No."},
        {
            "prompt": [{"role": "user", "content": "Hello!"}],
            "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": "No.",
        },
        {
            "chosen": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "No."}],
        },
        {  # the question twice
            "prompt": "Hello!",
            "chosen": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "No."}],
        },
        {  # LLaMA-Factory's
            "conversations": [{"from": "human", "value": "Hello!"}],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        *(
            {key: [{"role": "user", "content": "Hello!"}], "chosen": "Yes.", "rejected": "No."}
            for key in ("dialogue", "conversation", "messages")
        ),
    ],
    ids=lambda record: ",".join(record),
)
def test_the_records_that_people_have(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "one.jsonl", [record] * 2)
    data: Any = preferences(file, words, test_fraction=0).train
    assert isinstance(data, Pairs)
    both, targets = data[0]
    truth: list[Any] = []
    for answer in ("Yes.", "No."):
        turns = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": answer}]
        own: Any = chat(lines(tmp_path / "truth.jsonl", [{"messages": turns}]), words, test_fraction=0).train
        truth += own[0]
    assert all(torch.equal(found, wanted) for found, wanted in zip(both, truth, strict=True))
    assert targets.tolist() == [[0.0, float((truth[1] != -100).sum())], [0.0, float((truth[3] != -100).sum())]]


def test_pairs_are_held_out_and_left_out_together(words: str, tmp_path: Path) -> None:
    long = {"prompt": "Hello! " * 60, "chosen": "Yes.", "rejected": "No."}
    file = lines(tmp_path / "some.jsonl", [*records(9), long])
    splits = preferences(file, words, length=64, test_fraction=0.34)
    train, test = splits.train, splits.test
    assert isinstance(train, Pairs)
    assert isinstance(test, Pairs)
    assert (len(train), len(test)) == (6, 3)
    tokens, labels = train.padded([train[0], train[1]], train.sizes[-1])[0]
    assert tokens.shape == labels.shape == (2, 2, train.sizes[-1])
    train.reference_log_probabilities = torch.arange(12, dtype=torch.float64).view(6, 2)
    assert train[1][1][:, 0].tolist() == [2.0, 3.0]
    assert train.digests() == preferences(file, words, length=64, test_fraction=0.34).train.digests()  # type: ignore[attr-defined]


def test_what_is_refused(words: str, tmp_path: Path) -> None:
    good = lines(tmp_path / "good.jsonl", records())
    bad = lines(tmp_path / "bad.jsonl", [{"prompt": "Hello!", "chosen": "Yes."}])
    assert "no key rejected, beside which the data has a better and a worse answer" in refusal(
        preferences, file=bad, tokenizer=words
    )
    null = lines(tmp_path / "null.jsonl", [{"prompt": "Hello!", "chosen": None, "rejected": "No."}])
    assert "its chosen is empty (None)" in refusal(preferences, file=null, tokenizer=words)
    assert "from which data: {name: preferences} and loss: {name: dpo} (--method dpo) learn" in refusal(
        chat, file=good, tokenizer=words
    )
    base = job_of(tmp_path, words, "one device", {"name": "dpo"})
    document = yaml.safe_load(base.read_text())
    chats = {"name": "chat", "args": {"file": lines(tmp_path / "chats.jsonl", [CHAT] * 3), "tokenizer": words}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": {"name": "cross_entropy"}}, "holds preferences, and the loss is cross_entropy: preferences go with the losses"),
        ({"data": chats}, "holds none"),
        ({"loss": {"name": "mse", "beta": 1.0}}, "'beta' is of the loss dpo or simpo or orpo: leave it out"),
        ({"loss": {"name": "dpo", "gamma": 1.0}}, "'gamma' is of the loss simpo or reward: leave it out"),
        ({"loss": {"name": "kto"}}, "unknown loss 'kto': it compares each answer with the mean of those beside it"),
        ({"loss": {"name": "reward", "beta": 1.0}}, "'beta' is of the loss dpo or simpo or orpo: leave it out"),
        ({"loss": {"name": "reward"}, "adapter": {"r": 2}}, "the head that gives the scores does not train"),
        ({"model": {"name": "gpt"}}, "model 'gpt' has no argument 'rows', which takes both: take a causal_lm"),
    ]

    def built(document: dict[str, Any]) -> None:
        job = Job.parse(document, "the test's")
        build_loss(job.loss)
        build_layers(job, build_data(job))

    for changes, message in cases:
        assert message in refusal(built, document={**document, **changes}), changes
    assert "only a template of chats uses it" in refusal(preferences, file=good, tokenizer=words, template="none", thinking="on")
    with pytest.raises(InputError, match=r"takes the losses of the tokens of two answers \[b, 2, t\]"):
        dpo(torch.zeros(2, 3), torch.zeros(2, 2, 2))
    with pytest.raises(InputError, match=r"has no reward model of type 'cohere'"):
        scoring(transformers.CohereForCausalLM, transformers.CohereConfig())
    with pytest.raises(InputError, match=r"the loss of a reward model takes scores \[b, 2\], and the model gives \(2, 3\)"):
        reward(torch.zeros(2, 3), torch.zeros(2, 2, 2))


CHAT = {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Yes."}]}


def test_the_losses_of_a_few_numbers() -> None:
    losses, targets = torch.zeros(1, 2, 3), torch.zeros(1, 2, 2)
    losses[0, 0], losses[0, 1] = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 2.0, 2.0])
    targets[0] = torch.tensor([[-4.0, 2.0], [-5.0, 3.0]])
    given = (losses, losses > 0)
    assert float(dpo(given, targets, beta=0.5)) == pytest.approx(math.log(1 + math.exp(-0.5 * ((-3 + 4) - (-6 + 5)))))
    certain = torch.zeros_like(losses), losses > 0
    assert float(orpo(certain, targets)) == pytest.approx(0.1 * math.log(2)), "no odds are without end"
    assert float(simpo(given, targets, beta=2.0, gamma=0.3)) == pytest.approx(math.log(1 + math.exp(-(2 * (-1.5 + 2.0) - 0.3))))
