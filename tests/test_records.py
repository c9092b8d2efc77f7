"""Files of records (hetpipe/language/records): columns, lines, lists, patterns and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.language.conversations import chat, instructions
from hetpipe.language.documents import text
from tests.support.chats import lines, refusal, tokenizer

from transformers import AutoTokenizer  # isort: skip  # offline, as tests.support.chats sets it


def test_files_of_columns_and_of_texts(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "words")
    (tmp_path / "a.csv").write_text('﻿instruction,input,output\n"Hi, you","",Yes.\n"Two\nlines","12",No.\n', encoding="utf-8")
    (tmp_path / "b.tsv").write_text("question\tanswer\nHi\tYes.\n")
    its = AutoTokenizer.from_pretrained(folder)
    found = [instructions(str(tmp_path / name), folder, test_fraction=0).train for name in ("a.csv", "b.tsv")]
    assert str(its.decode(found[0][1][0])).startswith("<|im_start|>user\nTwo\nlines\n\n12<|im_end|>\n<|im_start|>assistant\nNo.")
    assert len(found[0]) == 2  # type: ignore[arg-type]
    assert str(its.decode(found[1][0][0])).startswith("<|im_start|>user\nHi<|im_end|>")
    (tmp_path / "c.csv").write_text("instruction,output\nHi,Yes.,more\n")
    assert "c.csv, line 2: it has 3 fields, and the first line of the file names 2" in refusal(
        instructions, file=str(tmp_path / "c.csv"), tokenizer=folder
    )
    (tmp_path / "d.csv").write_text("output,output\nHi,Yes.\n")
    assert "its first line, which names the columns, has 'output' twice" in refusal(
        instructions, file=str(tmp_path / "d.csv"), tokenizer=folder
    )
    file = lines(tmp_path / "t.jsonl", [{"text": "Hello you"}, {"text": "Yes."}])
    words = its("Hello you</s>Yes.", add_special_tokens=False)["input_ids"]
    windows = text(context=2, files=file, tokenizer=folder, test_fraction=0).train
    assert windows[0][0].tolist() == words[:2]
    assert bytes(text(context=4, files=file, test_fraction=0).train.text.tolist()) == b"Hello you\nYes."  # type: ignore[attr-defined]
    assert "t.jsonl, line 2: it has no text; found {'words': 'a'}" in refusal(
        text, files=lines(tmp_path / "t.jsonl", [{"text": "a"}, {"words": "a"}])
    )
    other = lines(tmp_path / "o.jsonl", [{"content": "Hello you"}])
    assert bytes(text(context=4, files=other, test_fraction=0, columns={"text": "content"}).train.text.tolist()) == b"Hello you"  # type: ignore[attr-defined]


ONE = '{"instruction": "Hi", "output": "Yes."}'


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("one.json", '{\n  "instruction": "Hi",\n  "output": "Yes."\n}\n', 1),
        ("list.jsonl", f"[\n{ONE},\n{ONE}\n]\n", 2),
        ("lines.json", f"{ONE}\n{ONE}\n", 2),
        ("one behind the other.jsonl", f"\ufeff{ONE}\n\ufeff{ONE}\n", 2),
        ("hashed.jsonl", '{"instruction": "Hi", "output": "Yes.", "id": 18446744073709551615}\n', 1),
        ("marked.csv", "instruction,output,weight\nHi,Yes.,1\nHi,No.,0\n", 1),
        (
            "masked.csv",
            (
                'messages,loss_mask\n"[{""role"":""user"",""content"":""Hi""},{""role"":""assistant"",'
                '""content"":""Yes.""}]","[0, true]"\n'
            ),
            1,
        ),
    ],
)
def test_files_as_people_have_them(name: str, content: str, count: int, tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "words")
    (tmp_path / name).write_text(content, encoding="utf-8")
    data = chat(str(tmp_path / name), folder, test_fraction=0).train
    texts = [str(AutoTokenizer.from_pretrained(folder).decode(data[i][0])) for i in range(len(data))]  # type: ignore[arg-type]
    assert texts == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"] * count


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", '{"version": 1,\n "data": []}\n', "record 1: it has none of the keys messages (or conversations), prompt"),
        (
            "a.jsonl",
            "[1,\n",
            "is not valid JSON: line 2, column 1: Expecting value; expected a list of records, or a record in each",
        ),
        ("a.tsv", 'question\tanswer\n"Hi" she said\tYes.\n', 'that begins with " ends with it, and has each " within it twice'),
        ("a.csv", "question, answer\nHi, Yes.\n", "its keys: [' answer', 'question']"),
    ],
)
def test_files_that_hold_something_else_are_told(name: str, content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert why in refusal(chat, file=str(tmp_path / name), tokenizer=tokenizer(tmp_path / "words"))


def test_a_file_of_texts_with_brackets_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes[1].txt").write_text("Hello")
    assert len(text(context=4, files=str(tmp_path / "notes[1].txt"), test_fraction=0).train) == 1  # type: ignore[arg-type]


def test_several_files_patterns_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, records = tokenizer(tmp_path / "words"), [{"prompt": letter, "completion": "b"} for letter in "abc"]
    for letter, record in zip("xyz", records, strict=True):
        lines(tmp_path / f"{letter}.jsonl", [record])
    (tmp_path / "notes.md").write_text("Hello")
    count = len(instructions(str(tmp_path / "*.jsonl"), folder, test_fraction=0).train)  # type: ignore[arg-type]
    assert count == 3
    assert f"no file matches '{tmp_path}/*.json'" in refusal(instructions, file=f"{tmp_path}/*.json", tokenizer=folder)
    twice = [str(tmp_path / "x.jsonl"), str(tmp_path / "*.jsonl")]
    assert "x.jsonl is named twice, so its records would count twice" in refusal(instructions, file=twice, tokenizer=folder)
    monkeypatch.chdir(tmp_path)
    both = ["x.jsonl", str(tmp_path / "x.jsonl")]
    assert "x.jsonl is named twice, so its records would count twice" in refusal(instructions, file=both, tokenizer=folder)
    assert len(text(context=4, files=["notes.md", str(tmp_path / "notes.md")], test_fraction=0).train) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("a.jsonl", "eval-0.json"), ("x_train.jsonl", "x_valid.csv")])
def test_a_folder_with_files_to_test_on_is_not_trained_on_as_a_whole(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "data").mkdir()
    folder = tokenizer(tmp_path / "words")
    for name in names:
        (tmp_path / "data" / name).write_text('{"prompt": "a", "completion": "b"}\n')
    told = refusal(instructions, file=str(tmp_path / "data"), tokenizer=folder)
    assert f"holds ['{names[1]}'] beside 1 others, and all would be trained on. Name the files to train on" in told
    (tmp_path / "data" / names[0]).rename(tmp_path / "data" / "latest.jsonl")
    (tmp_path / "data" / names[1]).rename(tmp_path / "data" / "device.jsonl")
    assert len(instructions(str(tmp_path / "data"), folder, test_fraction=0).train) == 2  # type: ignore[arg-type]
