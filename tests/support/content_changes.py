"""What may change between two runs, and what is said of each change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tests.support.chats import chat_of, lines

from safetensors.torch import load_file, save_file  # isort: skip

JOB, SAME, NOTE = "finetuned/job.yaml", "", "note: "
Edit = Callable[[], object]


def texts(count: int = 12) -> list[dict[str, Any]]:
    """Each of another length, with one answer or two."""
    last = ("and?", "No.")
    return [chat_of(f"Hello {'the ' * i}fox", f"Yes, {'dog ' * (i % 5)}{i}.", *last[: 2 * (i % 2)]) for i in range(count)]


def written(change: Callable[[list[Any]], object]) -> Edit:
    """The chats with a change."""

    def edit() -> None:
        records = texts()
        change(records)
        lines(Path("chats.jsonl"), records)

    return edit


def in_file(name: str, change: Callable[[Any], object]) -> Edit:
    """A JSON file of the model's folder with a change."""

    def edit() -> None:
        path = Path("tiny", name)
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def swapped(tokenizer: Any) -> None:
    words = tokenizer["model"]["vocab"]
    first, second = (next(w for w, n in words.items() if n == number) for number in (270, 290))
    words[first], words[second] = words[second], words[first]


def joined(tokenizer: Any) -> None:
    tokens = tokenizer["added_tokens"]
    tokens.append({**tokens[-1], "id": 511, "content": "<tool>"})


def in_template(old: str, new: str) -> Edit:
    def edit() -> None:
        path = Path("tiny/chat_template.jinja")
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return edit


def one_row() -> None:
    """Of one word, in the middle of the largest tensor."""
    path = Path("tiny/model.safetensors")
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][201] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def moved() -> None:
    Path("chats.jsonl").rename("others.jsonl")


def mended(records: list[Any]) -> None:
    records[3]["messages"][1]["content"] += " Mended."


def turned(records: list[Any]) -> None:
    records[2], records[7] = records[7], records[2]


def spaced() -> None:
    file = Path("chats.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record, separators=(" , ", " : ")) + "\n" for record in records))


def annotated(records: list[Any]) -> None:
    for number, record in enumerate(records):
        record["id"] = number


class Change(NamedTuple):
    """Files that are edited; options of the command, and the job's settings that say the same; arguments of the loop's data, its
    optimizer, batch and so on. `told`: what is said by all three, or by each of (job, finetune, own loop): a refusal, unless it
    begins with "note: "."""

    told: str | tuple[str, str, str]
    edit: Edit = bool
    options: Mapping[str, Any] = {}
    settings: tuple[str, ...] = ()
    loop: Mapping[str, Any] = {}


OTHERS, ORDER = "samples are others", "the samples are in another order"
ROW = "was saved with adapters beside a model with other numbers, under the same names and shapes; layer 'embed' is the first"
EPSILON = "write model.args.weights as it was (tiny)\n  model.config.rms_norm_eps was 1e-06, is 0.01"
CHANGES = {
    "an answer was mended": Change(OTHERS, written(mended)),
    "a word became another": Change(OTHERS, written(lambda r: r[5]["messages"][0].update(content="Hello dog"))),
    "two chats changed places": Change(ORDER, written(turned)),
    "one chat less": Change("there were 12 samples to train on, and there are 11", written(lambda r: r.pop(4))),
    "one chat more": Change("there were 12 samples to train on, and there are 13", written(lambda r: r.append(r[0]))),
    "a chat twice, another gone": Change(OTHERS, written(lambda r: r.__setitem__(4, r[5]))),
    "an answer is not learned": Change(OTHERS, written(lambda r: r[7]["messages"][1].update(weight=0))),
    "an answer that is not learned, at the end": Change(
        SAME,
        written(
            lambda r: r[6]["messages"].extend(
                [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "No.", "weight": 0}]
            )
        ),
    ),
    "a system prompt": Change(OTHERS, written(lambda r: r[0]["messages"].insert(0, {"role": "system", "content": "well"}))),
    "keys that nobody reads": Change("note: of chats.jsonl, nothing reads the keys (each in so many", written(annotated)),
    "spaces between keys": Change(SAME, spaced),
    "the file was moved": Change(
        ("note: data.args.file was 'chats.jsonl', is 'others.jsonl'", "note: data.args.file was 'chats.jsonl'", SAME),
        moved,
        {"data": ("others.jsonl",)},
        ("data.args.file=others.jsonl",),
        {"file": "others.jsonl"},
    ),
    "two words changed their numbers": Change("the tokenizer is another", in_file("tokenizer.json", swapped)),
    "a special token more": Change("the tokenizer is another", in_file("tokenizer.json", joined)),
    "what the tokenizer is called": Change(SAME, in_file("tokenizer_config.json", lambda c: c.update(name_or_path="it"))),
    "the template begins otherwise": Change("the template of chats is another", in_template("{% for", "Hello{% for")),
    "the template in other words": Change("the template of chats is another", in_template("{% for", "{# #}{% for")),
    "one row of the base": Change((ROW, ROW, "was saved with adapters of the model "), one_row, loop={"seed": 1}),
    "how the base computes": Change((EPSILON, EPSILON, SAME), in_file("config.json", lambda c: c.update(rms_norm_eps=0.01))),
    "samples were cut": Change(
        "there were 12 samples to train on, and there are ", bool, {"length": 16}, ("data.args.length=16",), {"length": 16}
    ),
    "a limit that cuts nothing": Change(
        ("note: data.args.length was", "note: data.args.length was", SAME),
        bool,
        {"length": 250},
        ("data.args.length=250",),
        {"length": 250},
    ),
    "packed": Change(
        "there were 12 samples to train on, and there are ",
        bool,
        {"settings": ("data.args.pack=true",)},
        ("data.args.pack=true",),
        {"pack": True},
    ),
    "some are held out": Change(
        "there were 12 samples to train on, and there are 9",
        bool,
        {"settings": ("data.args.test_fraction=0.25",)},
        ("data.args.test_fraction=0.25",),
        {"test_fraction": 0.25},
    ),
    "the last answers only": Change(OTHERS, bool, {"turns": "last"}, ("data.args.turns=last",), {"turns": "last"}),
    "all answers, said by name": Change(
        ("note: data.args.turns was None, is 'all'", "note: data.args.turns was None, is 'all'", SAME),
        bool,
        {"turns": "all"},
        ("data.args.turns=all",),
        {"turns": "all"},
    ),
    "another rank": Change(
        ("adapter.r was 4, is 8", "adapter.r was 4, is 8", "r was 4, is 8"), bool, {"lora": "r=8"}, ("adapter.r=8",), {"r": 8}
    ),
    "another dropout": Change(
        ("note: adapter.dropout was 0.0, is 0.1", "adapter.dropout was 0.0, is 0.1", "note: the model's modules"),
        bool,
        {"lora": "r=4,dropout=0.1"},
        ("adapter.dropout=0.1",),
        {"dropout": 0.1},
    ),
    "another rate": Change(
        (
            "train.optimizer.lr was 0.0002, is 0.001",
            "train.optimizer.lr was 0.0002, is 0.001",
            "note: optimizer.lr was 0.0002, is 0.001",
        ),
        bool,
        {"rate": 1e-3},
        ("train.optimizer.lr=0.001",),
        {"lr": 1e-3},
    ),
    "another optimizer": Change(
        (
            "saved with the optimizer AdamW, but the job has SGD",
            "train.optimizer.name was 'AdamW', is 'SGD'",
            "optimizer was 'AdamW', is 'SGD'",
        ),
        bool,
        {"settings": ("train.optimizer.name=SGD",)},
        ("train.optimizer.name=SGD",),
        {"optimizer": "SGD"},
    ),
    "another batch": Change(
        ("note: train.global_batch was 4, is 6", "train.global_batch was 4, is 6", "note: global_batch was 4, is 6"),
        bool,
        {"global_batch": 6},
        ("train.global_batch=6",),
        {"global_batch": 6},
    ),
    "another loss": Change(
        (
            "note: loss.fused was 'auto', is False",
            "loss.fused was 'auto', is False",
            "note: loss was 'cross_entropy', is 'cross_entropy(label_smoothing=0.1)'",
        ),
        bool,
        {"settings": ("loss.fused=false",)},
        ("loss.fused=false",),
        {"loss": partial(nn.functional.cross_entropy, label_smoothing=0.1)},
    ),
}
