"""Keys, commands and options that people guess: each gets an answer, and what the answer says can be written."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import torch
import yaml

from hetpipe.building.build import optimizer_factory
from hetpipe.cli.guesses import instead
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.guesses import Answers, Guesses, guesses
from hetpipe.documents.job import Job
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.files.messages import InputError
from tests.support.commands import Command
from tests.support.pages import check_hetpipe

JOB: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "model": {"name": "gpt"},
    "data": {"name": "text"},
    "train": {"global_batch": 8, "steps": 5},
}
LINK: dict[str, Any] = {"bandwidth": 1e9}
CLUSTER: dict[str, Any] = {
    "format": "hetpipe.cluster/1",
    "device_types": {"a100": {"memory": 100}},
    "link": LINK,
    "nodes": [{"name": "n0", "devices": {"a100": 2}}],
}
ADAPTED = JOB | {"adapter": {"kind": "lora"}, "export": {"folder": "adapter"}}
# where the keys of a section are tried: the document, and the path to the section in it
PLACES: dict[str, tuple[dict[str, Any], tuple[str | int, ...]]] = {
    "job": (JOB, ()),
    "train": (JOB, ("train",)),
    "model": (JOB, ("model",)),
    "data": (JOB, ("data",)),
    "loss": (JOB | {"loss": {"name": "mse"}}, ("loss",)),
    "plan": (JOB | {"plan": {}}, ("plan",)),
    "log": (JOB | {"log": {"folder": "l"}}, ("log",)),
    "checkpoint": (JOB | {"checkpoint": {"folder": "c"}}, ("checkpoint",)),
    "adapter": (ADAPTED, ("adapter",)),
    "export": (ADAPTED, ("export",)),
    "profiler": (JOB | {"profiler": {}}, ("profiler",)),
    "cluster": (CLUSTER, ()),
    "link": (CLUSTER, ("link",)),
    "device type": (CLUSTER, ("device_types", "a100")),
    "node": (CLUSTER, ("nodes", 0)),
}
TABLES: dict[str, tuple[dict[str, Any], tuple[str | int, ...], Answers]] = {
    name: (document, path, guesses().by_place[name]) for name, (document, path) in PLACES.items()
}
COMMANDS, ARGUMENTS = guesses().by_place["hetpipe"], guesses().arguments
OPTIONS = {
    place.removeprefix("hetpipe "): answers for place, answers in guesses().by_place.items() if place.startswith("hetpipe ")
}
TRIED = [(table, key) for table, (_, _, answers) in TABLES.items() for key in answers]
SNIPPET = re.compile(
    r"'((?:train|evaluate|checkpoint|log|model|data|loss|plan|adapter|export|nodes|device_types|link): [\[{][^']*)'"
)


def tried(table: str, key: str) -> str:
    """What is said of this key in its section."""
    document, path, _ = TABLES[table]
    document = yaml.safe_load(yaml.safe_dump(document))
    place: Any = document
    for part in path:
        place = place[part]
    place[key] = 1
    with pytest.raises(InputError) as caught:
        (Job if document["format"] == JOB["format"] else Cluster).parse(document, "the file")
    return str(caught.value)


def test_every_key_of_the_file_is_tried() -> None:
    assert {place for guess in guesses().keys for places in guess.tried for place in places.split(" and ")} == PLACES.keys()
    assert guesses().by_place.keys() == {*PLACES, "hetpipe", *(f"hetpipe {command}" for command in OPTIONS)}


def test_a_key_has_one_answer() -> None:
    answer = {"answer": "write 'train: {steps: 5}'", "tried": {"job and train": ["max_steps"], "train": ["max_steps"]}}
    twice = {"format": "hetpipe.guesses/1", "keys": [answer], "command_line": [], "arguments": {}, "optimizer": {}, "losses": {}}
    with pytest.raises(InputError, match="top level: 'max_steps' has 2 answers under 'train'"):
        Guesses.parse(twice, "the file")


@pytest.mark.parametrize(("table", "key"), TRIED, ids=[f"{table} {key}" for table, key in TRIED])
def test_a_guessed_key_says_what_to_write(table: str, key: str) -> None:
    answer = TABLES[table][2][key]
    where = ".".join(map(str, TABLES[table][1])) or "top level"
    assert f"  {where}: unknown key {key!r}: {answer}" in tried(table, key), "whole, and not cut"


def test_answers_can_be_written() -> None:
    """Each part of a file in an answer, put into a file."""
    written = {snippet for _, _, answers in TABLES.values() for answer in answers.values() for snippet in SNIPPET.findall(answer)}
    assert len(written) > 20
    for snippet in written:
        ((key, value),) = yaml.safe_load(snippet).items()
        if key in ("nodes", "device_types", "link"):
            own = CLUSTER | {key: value}
            if key == "device_types":
                own |= {"nodes": [{"name": "n0", "devices": {next(iter(value)): 1}}]}
            Cluster.parse(own, snippet)
            continue
        section = value if key == "model" or key == "data" else {**JOB.get(key, {}), **value}
        if "epochs" in section:
            section.pop("steps")
        kept = {"checkpoint": {"folder": "c"}, "adapter": {"kind": "lora"}} if key == "export" else {}
        Job.parse(JOB | kept | {key: section}, snippet)


def test_no_answer_is_for_a_key_that_there_is() -> None:
    for name, (document, path, answers) in TABLES.items():
        said = tried(name, "no-such-key")
        known = said.rpartition("known: ")[2].split(", ")
        assert set(known) & set(answers) == set(), (name, document, path)


@pytest.mark.parametrize(("theirs", "ours"), guesses().optimizer.items())
def test_arguments_of_an_optimizer_by_other_names(theirs: str, ours: str) -> None:
    section = TorchNamed.model_validate({"name": "AdamW", theirs: 0.1})
    with pytest.raises(InputError, match=f"'AdamW' has no argument '{theirs}': it is called '{ours}'"):
        optimizer_factory(section)([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_guessed_command_says_what_to_type(run: Command, command: str) -> None:
    found = run(command, "job.yaml")
    assert (found.code, found.out) == (2, "")
    assert found.err.endswith(f"{COMMANDS[command]}\n")


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, options in OPTIONS.items() for o in options])
def test_a_guessed_option_says_what_to_type(run: Command, command: str, option: str) -> None:
    for words in ((option, "3"), (f"{option}=3",)) if option.startswith("--") else ((option, "3"),):
        found = run(command, "job.yaml", *words)
        assert (found.code, found.out) == (2, "")
        assert found.err.endswith(f"{OPTIONS[command][option]}\n")


@pytest.mark.parametrize("command", ARGUMENTS)
def test_an_argument_where_there_is_none(run: Command, command: str) -> None:
    found = run(command, *(["llama-7b", "3090"] if command == "what-if" else ["job.yaml"]))
    assert (found.code, found.out) == (2, "")
    assert found.err.endswith(f"{ARGUMENTS[command]}\n")


def test_what_is_said_can_be_typed() -> None:
    """With the options that there are."""
    texts = [*COMMANDS.values(), *ARGUMENTS.values(), *(text for options in OPTIONS.values() for text in options.values())]
    ends = r"; |: |, | \(|\)| (?:measures|plans|does|starts|writes|which|is|and|takes)\b"
    parts = [part for text in texts for part in re.split(ends, text.replace(", and hetpipe", "; hetpipe"))]
    lines = {part for part in parts if part.startswith("hetpipe ")}
    assert len(lines) > 25
    for line in lines:
        if not line.endswith(("--help", "--version")):
            check_hetpipe(shlex.split(line)[1:])


def test_nothing_is_said_of_what_nobody_knows() -> None:
    assert [instead(words) for words in ([], ["train"], ["trian"], ["plan", "--global-batch", "0"], ["what-if", "x"])] == [""] * 5
