"""Data for language models (hetpipe/language): which tokens are learned, and what is told of files. Rows of samples are in
test_packing.py, and batches of samples of different lengths in test_ragged.py."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.building.data import fetch
from hetpipe.language.conversations import chat, instructions
from hetpipe.language.documents import text
from hetpipe.language.reading import read as reading
from hetpipe.language.tokenizer import PARALLEL
from tests.support import chats
from tests.support.chats import chat_of, lines, refusal, tokenizer

from transformers import AutoTokenizer  # isort: skip  # offline, as tests.support.chats sets it
from tests.support.by_hand import BY_HAND, TALK, Segments


def by_hand(folder: str, segments: Segments) -> tuple[list[int], list[int]]:
    """Inputs and targets of these parts."""
    its, numbers, wanted = AutoTokenizer.from_pretrained(folder), list[int](), list[int]()
    for part, learned in segments:
        own = its(part, add_special_tokens=False)["input_ids"]
        numbers += own
        wanted += own if learned else [-100] * len(own)
    return numbers[:-1], wanted[1:]


def plain(pair: Any) -> tuple[list[int], list[int]]:
    return pair[0].tolist(), pair[1].tolist()


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.mark.parametrize("name", BY_HAND)
def test_what_the_assistant_says_is_learned_with_the_end_of_each_turn(name: str, tmp_path: Path) -> None:
    template, options, segments = BY_HAND[name]
    folder = tokenizer(tmp_path / "tokenizer", template, **options)
    file = lines(tmp_path / "chats.jsonl", [chat_of(*TALK)])
    (sample,) = [chat(file, folder, test_fraction=0).train[0]]
    assert plain(sample) == by_hand(folder, segments)
    learned = [i for i, (_, counts) in enumerate(segments) if counts]
    only_last = [(part, i == learned[-1]) for i, (part, _) in enumerate(segments)]
    assert plain(chat(file, folder, turns="last", test_fraction=0).train[0]) == by_hand(folder, only_last)


def test_where_a_template_writes_earlier_answers_otherwise_each_is_a_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it is written at inference. The mask of one row would be that of another text."""
    folder = tokenizer(tmp_path / "tokenizer", chats.THINKING)
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hello", "Yes."), chat_of("And?", "<think>hm</think>Yes.", "No?", "No.")])
    with heard(caplog):
        data = chat(file, folder, test_fraction=0).train
    begin, end = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "\n"
    assert [plain(data[i]) for i in range(len(data))] == [  # type: ignore[arg-type]
        by_hand(folder, [(begin.format("Hello"), False), ("Yes.<|im_end|>", True), (end, False)]),
        by_hand(folder, [(begin.format("And?"), False), ("<think>hm</think>Yes.<|im_end|>", True), (end, False)]),
        by_hand(
            folder,
            [(f"{begin.format('And?')}Yes.<|im_end|>\n{begin.format('No?')}", False), ("No.<|im_end|>", True), (end, False)],
        ),
    ]
    more = len(data[1][0])
    assert "\n".join(caplog.messages) == (
        f"note: 1 of 2 records of {file} are 2 samples, one for each answer, since the template writes earlier answers, or what "
        f"is before them, otherwise when more follows: {more} tokens more than one sample each; turns: last (--turns last) "
        "learns the last ones only"
    )
    said = refusal(chat, file=file, tokenizer=folder, turns="all")
    assert said.startswith("1 of 2 records cannot be used:\n")
    assert f"{file}, line 2: the template writes earlier answers otherwise when more follows (some leave out what was th" in said
    assert "turns: auto makes a sample of each answer, turns: last learns the last one only" in said
    assert len(chat(file, folder, turns="last", test_fraction=0).train) == 2  # type: ignore[arg-type]


def test_samples_of_one_chat_are_held_out_together(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "tokenizer", chats.THINKING)
    talk = [chat_of(f"And {i}?", "<think>hm</think>Yes.", "No?", "No.") for i in range(4)]
    found = chat(lines(tmp_path / "chats.jsonl", talk), folder, test_fraction=0.5)
    its = AutoTokenizer.from_pretrained(folder)
    held = [str(its.decode(found.test[i][0])) for i in range(len(found.test))]  # type: ignore[arg-type, index]
    assert len(found.train) == len(held) == 4  # type: ignore[arg-type]
    assert ["And 1" in text for text in held] == [True, True, False, False]
    assert ["And 3" in text for text in held] == [False, False, True, True]


def test_other_keys_tools_and_chats_without_an_answer(chatml: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain_chat, tools = chat_of("Hello", "Yes."), [{"type": "function", "function": {"name": "look"}}]
    other = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes."}]}
    parts = chat_of("Hello", "Yes.")
    parts["messages"][1]["content"] = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]
    parts["messages"][0]["name"] = None
    file = lines(tmp_path / "chats.jsonl", [plain_chat, other, parts, chat_of("Hello")])
    with heard(caplog):
        data = chat(file, chatml, test_fraction=0).train
    assert len(data) == 3  # type: ignore[arg-type]
    assert plain(data[0]) == plain(data[1]) == plain(data[2])
    assert caplog.messages == [f"note: of 4 records of {file}, 1 have no token to learn and were left out"]
    file = lines(tmp_path / "tools.jsonl", [plain_chat, {**other, "tools": json.dumps(tools)}])
    said = refusal(chat, file=file, tokenizer=chatml)
    assert f"{file}, line 2: the template does not write the tool 'look'; take a template that does (template: FILE, or " in said
    folder = tokenizer(tmp_path / "with-tools", "{% if tools %}{{ tools | tojson }}{% endif %}" + chats.CHATML)
    first, second = (chat(file, folder, test_fraction=0).train[i][0] for i in (0, 1))
    said = str(AutoTokenizer.from_pretrained(folder).decode(second))
    assert said.startswith('[{"type": "function", "function": {"name": "look"}}]<')
    assert len(first) < len(second)


class heard:  # noqa: N801
    """What the logger of hetpipe says is heard."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog, self.logger = caplog, logging.getLogger("hetpipe")

    def __enter__(self) -> None:
        self.logger.addHandler(self.caplog.handler)

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.caplog.handler)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "And then? ", "completion": "Yes."},
        {"instruction": "And then?", "output": "Yes."},
        {"instruction": "And", "input": "then?", "output": "Yes."},
        {"instruction": "And then?", "input": "", "output": "Yes."},
    ],
)
def test_a_completion_and_the_end_are_learned(record: dict[str, str], chatml: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "pairs.jsonl", [record])
    (sample,) = [instructions(file, chatml, template="none", test_fraction=0).train[0]]
    asked = "And then?" if record.get("input", "") == "" else "And\n\nthen?"
    assert plain(sample) == by_hand(chatml, [(record.get("prompt", f"{asked}\n\n"), False), ("Yes.</s>", True)])
    (sample,) = [instructions(file, chatml, test_fraction=0).train[0]]
    parts = [(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n", False), ("Yes.<|im_end|>", True), ("\n", False)]
    assert plain(sample) == by_hand(chatml, [("And then? ", False), ("Yes.</s>", True)] if "prompt" in record else parts)


def test_a_token_that_begins_a_text_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = tokenizer(tmp_path / "tokenizer")
    its = AutoTokenizer.from_pretrained(folder)
    its.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    its.save_pretrained(tmp_path / "both")
    file = lines(tmp_path / "pairs.jsonl", [{"prompt": "And then? ", "completion": "Yes."}, {"prompt": "No", "completion": ""}])
    data = instructions(file, str(tmp_path / "both"), test_fraction=0).train
    assert plain(data[0]) == by_hand(folder, [("<s>And then? ", False), ("Yes.</s>", True)])
    assert plain(data[1]) == by_hand(folder, [("<s>No", False), ("</s>", True)])


OTHERS = "; columns gives keys other names, as in {prompt: ask, content: says}"


def test_an_empty_a_broken_and_a_wrong_line_are_told_by_their_numbers(chatml: str, tmp_path: Path) -> None:
    good = chat_of("Hello", "Yes.")
    file = lines(
        tmp_path / "chats.jsonl",
        [
            good,
            "",
            '{"messages": [',
            {"text": "Hello"},
            {"messages": []},
            {"messages": [{"role": "oracle", "content": "Hm"}]},
            {"messages": [{"role": "user"}]},
            [1],
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {"messages": ["Hello"]},
            good,
        ],
    )
    said = refusal(chat, file=file, tokenizer=chatml).splitlines()
    assert said == [
        "9 of 11 records cannot be used:",
        f"  {file}, line 2: the line is empty",
        f"  {file}, line 3: not valid JSON: column 15: Expecting value",
        f"  {file}, line 4: it has a text, and nothing says which part of it to learn. Take data: {{name: text}}",
        f"  {file}, line 5: messages must be a list of turns, found []",
        (
            f"  {file}, line 6: turn 1 has the unknown role 'oracle'; known: system, developer, user, assistant, tool, and "
            "human, gpt, observation, function_call; columns gives roles other names, as in {user: customer}"
        ),
        f"  {file}, line 7: it has turn 1 without a content; its keys: ['role']{OTHERS}",
        f"  {file}, line 8: expected a mapping with the key messages, or prompt and completion, found a list",
        f"  {file}, line 9: turn 1 has no content that is text: [{{'type': 'image'}}]",
        "  … and 1 more",
    ]
    file = lines(tmp_path / "pairs.jsonl", [{"prompt": "a"}, {"instruction": 1, "output": "b"}, {"text": "c"}, 5])
    assert refusal(instructions, file=file, tokenizer=chatml).splitlines() == [
        "4 of 4 records cannot be used:",
        f"  {file}, line 1: it has no key completion (nor output, nor answer); its keys: ['prompt']{OTHERS}",
        f"  {file}, line 2: instruction must be a text, found 1",
        f"  {file}, line 3: it has a text, and nothing says which part of it to learn. Take data: {{name: text}}",
        f"  {file}, line 4: expected a mapping with the key messages, or prompt and completion, found a int",
    ]
    (tmp_path / "bytes.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\r\n{"prompt": "\xff"}\n')
    found = refusal(instructions, file=str(tmp_path / "bytes.jsonl"), tokenizer=chatml)
    assert found.startswith("1 of 2 records cannot be used:\n")
    assert found.endswith("bytes.jsonl, line 2: byte 12 is not UTF-8")
    answered = [{"role": "user", "content": "a"}] * 2 + chat_of("", "b")["messages"][1:]
    template = lines(tmp_path / "twice.jsonl", [{"messages": answered}])
    folder = tokenizer(tmp_path / "mistral", chats.MISTRAL)
    assert "line 1: the template does not take it: roles must alternate user" in refusal(chat, file=template, tokenizer=folder)


def test_what_is_too_long_is_cut_left_out_or_refused_and_told_once(
    chatml: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "TOGETHER", 2)
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a ", "completion": "b " * 50}
    file = lines(tmp_path / "pairs.jsonl", [short, long, short, long, {"prompt": "a " * 50, "completion": "b"}])
    with heard(caplog):
        data = instructions(file, chatml, 8, test_fraction=0).train
    assert [len(data[i][0]) for i in range(len(data))] == [2, 8, 2, 8]  # type: ignore[arg-type]
    assert int(data[1][1][-1]) != -100, "the last token is a target still"
    assert re.fullmatch(
        rf"note: of 5 records of {re.escape(file)}, 3 are longer than 8 tokens and were cut \(the first: "
        rf"{re.escape(file)}, line 2: \d+ tokens\); 1 have no token to learn within these and were left out",
        "\n".join(caplog.messages),
    )
    caplog.clear()
    with heard(caplog):
        assert len(instructions(file, chatml, 8, too_long="drop", test_fraction=0).train) == 2  # type: ignore[arg-type]
    assert "3 are longer than 8 tokens and were left out" in "\n".join(caplog.messages)
    said = refusal(instructions, file=file, tokenizer=chatml, length=8, too_long="refuse")
    assert said.startswith("3 of 5 records are longer than length: 8; too_long: truncate cuts such, drop leaves them out:\n")
    assert f"{file}, line 2: " in said
    file = lines(tmp_path / "long.jsonl", [{"prompt": "a " * 50, "completion": "b"}])
    said = refusal(instructions, file=file, tokenizer=chatml, length=8)
    assert "none of 1 records has a token to learn within the first 8" in said


def test_files_folders_and_lists_are_read_in_order(chatml: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    records = [{"prompt": letter, "completion": "b"} for letter in "abcd"]
    one = lines(tmp_path / "data" / "2.jsonl", records[2:])
    (tmp_path / "data" / "1.json").write_text(json.dumps(records[:2]))
    (tmp_path / "data" / "README.md").write_text("not read")
    its = AutoTokenizer.from_pretrained(chatml)

    def prompts(file: Any, **options: Any) -> str:
        data = instructions(file, chatml, test_fraction=0, **options).train
        return "".join(str(its.decode(data[i][0][:1])) for i in range(len(data)))  # type: ignore[arg-type]

    assert prompts(str(tmp_path / "data")) == "abcd"
    assert prompts([one, str(tmp_path / "data" / "1.json")]) == "cdab"
    assert prompts(str(tmp_path / "data"), limit=3) == "abc"
    splits = instructions(str(tmp_path / "data"), chatml, test_fraction=0.5)
    assert (len(splits.train), len(splits.test)) == (2, 2)  # type: ignore[arg-type]


def test_a_data_set_of_the_hub_is_had_by_the_library_for_them(
    chatml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, library = list[Any](), types.ModuleType("datasets")

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, subset, split))
        if split == "nope":
            raise ValueError('Unknown split "nope".\nShould be one of [train]')
        return [{"prompt": "a", "completion": "b", "messages": None}, {"prompt": None, "completion": "b"}]

    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.chdir(tmp_path)
    data = instructions("them/pairs", chatml, limit=1, subset="en", test_fraction=0).train
    assert plain(data[0]) == by_hand(chatml, [("a", False), ("b</s>", True)])
    assert set(asked) == {("them/pairs", "en", "train")}
    said = refusal(instructions, file="them/pairs", tokenizer=chatml)
    assert "them/pairs, split train, record 2: it has no key prompt (nor instruction, nor question); its keys: ['compl" in said
    said = refusal(instructions, file="them/pairs", tokenizer=chatml, split="nope")
    assert "as a data set of the hub, split 'nope', it cannot be had: Unknown split \"nope\". Should be one of [train]" in said
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = refusal(instructions, file="them/pairs", tokenizer=chatml)
    assert said.startswith("there is no file or folder 'them/pairs' (from ")
    assert said.endswith("for a data set of this name of the hub, pip install 'hetpipe[text]'")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "a.parquet needs pyarrow to be read: pip install 'hetpipe[text]'" in refusal(
        instructions, file=str(tmp_path), tokenizer=chatml
    )


def test_what_only_some_calls_have_is_none_of_the_others(chatml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of mappings make every key of each of them, at any depth."""
    library, where = types.ModuleType("datasets"), {"from": "Rome", "to": None, "days": [None, {"a": None, "b": 1}]}
    call = {"function": {"name": "fly", "arguments": where}}
    turns = [{"role": "user", "content": "Hi", "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    library.load_dataset = lambda *_, **__: [{"messages": turns, "tools": None}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"
    )
    tokens, _ = chat("them/calls", chatml, template=str(tmp_path / "own.jinja"), test_fraction=0).train[0]
    text = AutoTokenizer.from_pretrained(chatml).decode(tokens)
    assert '{"name": "fly", "arguments": {"from": "Rome", "days": [null, {"b": 1}]}}' in text


def test_text_in_windows_of_tokens(chatml: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Yes. the quick brown fox")
    (tmp_path / "b.txt").write_text("No. a river 🦆")
    found = text(context=3, files=str(tmp_path / "*.txt"), test_fraction=0, tokenizer=chatml)
    numbers, _ = by_hand(chatml, [("Yes. the quick brown fox</s>No. a river 🦆</s>", True)])
    inputs, targets = fetch(found.train, torch.arange(len(found.train)))  # type: ignore[arg-type]
    count = (len(numbers) - 1) // 3 * 3
    assert (inputs.flatten().tolist(), targets.flatten().tolist()) == (numbers[:count], numbers[1 : count + 1])
    assert (found.names, text(limit_bytes=5000).names) == (("input_ids",), ("input_ids",))
    cut = text(context=3, files=str(tmp_path / "b.txt"), test_fraction=0, tokenizer=chatml, limit_bytes=14)
    assert len(cut.train) == (len(by_hand(chatml, [("No. a river </s>", True)])[0]) - 1) // 3  # type: ignore[arg-type]
    (tmp_path / "b.txt").write_bytes(b"No\xff")
    assert "b.txt is not UTF-8 at byte 2" in refusal(text, files=str(tmp_path / "b.txt"), tokenizer=chatml)


def test_special_tokens_in_texts_are_told(chatml: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = lines(tmp_path / "texts.jsonl", [{"text": "Yes.</s>No."}, {"text": "the quick brown fox"}])
    with heard(caplog):
        text(context=2, files=file, tokenizer=chatml, test_fraction=0)
    assert [note.split(" (")[0] for note in caplog.messages] == ["note: 1 of 2 texts hold special tokens of the tokenizer"]


def test_threads_of_the_tokenizer_are_off_in_processes_that_are_forked_later(chatml: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hello", "Yes.")] * 3)
    chat(file, chatml)
    assert os.environ.get(PARALLEL) == "false"
