"""The records that people have (hetpipe/language/formats): what they mean is what is learned, or they are refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hetpipe.language.conversations import chat, instructions
from hetpipe.language.formats.chats import Chat
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.formats import kind_of_record, read_record
from hetpipe.language.formats.pairs import Pair
from hetpipe.language.formats.turns import Turn
from hetpipe.language.records.record import UnusableError
from tests.support import chats
from tests.support.chats import chat_of, lines, refusal, tokenizer

from transformers import AutoTokenizer  # isort: skip  # offline, as tests.support.chats sets it

CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "here"}}}
U, A = Turn("user", "Hi"), Turn("assistant", "Yes.")
OFF = A._replace(learned=False)


def read(record: Any, templated: bool | None = None, **columns: Any) -> Chat | Pair:
    return read_record(json.loads(json.dumps(record)), Columns(columns), templated=templated)


def turns(record: Any, **columns: Any) -> list[Turn]:
    found = read(record, **columns)
    assert isinstance(found, Chat)
    return list(found.turns)


def wrong(record: Any, **columns: Any) -> str:
    with pytest.raises(UnusableError) as caught:
        read(record, **columns)
    return str(caught.value)


def said(
    *contents: str, role: str = "role", content: str = "content", roles: tuple[str, str] = ("user", "assistant")
) -> list[dict[str, Any]]:
    return [{role: roles[i % 2], content: each} for i, each in enumerate(contents)]


MARKED: list[tuple[str, Any]] = [
    ("weight", {"weight": 0}),
    ("weight as a number", {"weight": 0.0}),
    ("train", {"train": False}),
    ("training", {"training": False}),
    ("trainable", {"trainable": False}),
    ("loss", {"loss": False}),
    ("loss_mask", {"loss_mask": 0}),
    ("loss_weight", {"loss_weight": 0.0}),
]


@pytest.mark.parametrize("mark", [mark for _, mark in MARKED], ids=[name for name, _ in MARKED])
def test_a_turn_that_is_marked_is_not_learned(mark: dict[str, Any]) -> None:
    first, second, third, fourth = said("Hi", "Yes.", "Hi", "Yes.")
    assert turns({"messages": [first, {**second, **mark}, third, fourth]}) == [U, OFF, U, A]
    other = {key: not value if isinstance(value, bool) else 1 for key, value in mark.items()}
    assert turns({"messages": [first, {**second, **other}]}) == [U, A]
    assert turns({"messages": [{**first, **mark}, second]}) == [U._replace(learned=False), A]


def test_marks_of_a_record_are_of_all_its_answers_or_of_each_turn() -> None:
    two = said("Hi", "Yes.", "Hi", "Yes.")
    assert turns({"messages": two, "loss_mask": 0}) == turns({"messages": two, "weight": 0}) == [U, OFF, U, OFF]
    assert turns({"messages": two, "loss_mask": True}) == [U, A, U, A]
    assert turns({"messages": two, "loss_mask": [0, 0, 0, 1]}) == [U, OFF, U, A]
    assert "loss_mask has 2 marks, but there are 4 turns. Give one mark for each turn, or one for all" in wrong(
        {"messages": two, "loss_mask": [0, 1]}
    )
    assert "loss_mask marks turn 1 as learned, but its role is user" in wrong({"messages": two, "loss_mask": [1, 1, 1, 1]})
    pair = read({"prompt": "a", "completion": "b", "weight": 0})
    assert isinstance(pair, Pair)
    assert not pair.learned


def test_marks_that_cannot_be_kept_are_refused() -> None:
    first, second = said("Hi", "Yes.")
    half = {**second, "weight": 0.5}
    assert "turn 2 has weight: 0.5; a turn is learned (1, true) or not (0, false)" in wrong({"messages": [first, half]})
    assert "the record has weight: 3" in wrong({"messages": [first, second], "weight": 3})
    assert "turn 1 is marked to be learned, but its role is user" in wrong({"messages": [{**first, "train": True}, second]})
    assert "turn 2 has train_detail: it marks parts of a turn" in wrong({"messages": [first, {**second, "train_detail": [{}]}]})
    both = {**second, "train": True, "weight": 0}
    assert "has marks that contradict each other on whether it is learned" in wrong({"messages": [first, both]})


SYSTEM = [Turn("system", "Be short."), U, A]


@pytest.mark.parametrize(
    "record",
    [
        {"system": "Be short.", "conversations": said("Hi", "Yes.", role="from", content="value", roles=("human", "gpt"))},
        {"system": "Be short.", "messages": said("Hi", "Yes.")},
        {"system": "Be short.", "messages": [{"role": "system", "content": "Be short. "}, *said("Hi", "Yes.")]},
        {"system": "Be short.", "instruction": "Hi", "input": "", "output": "Yes."},
        {"system_prompt": "Be short.", "question": "Hi", "response": "Yes."},
        {"system": "Be short.", "instruction": "Hi", "output": "Yes.", "history": []},
    ],
)
def test_the_system_of_a_record_is_its_first_turn(record: Any) -> None:
    assert [turn._replace(content=(turn.content or "").strip()) for turn in turns(record)] == SYSTEM


def test_two_systems_are_refused() -> None:
    record = {"system": "Be long.", "messages": [{"role": "system", "content": "Be short."}, *said("Hi", "Yes.")]}
    assert "it has system: 'Be long.', and its first turn is of the system, too: 'Be short.'. Leave one of the two out" in wrong(
        record
    )


def test_history_comes_before_the_question() -> None:
    record = {"instruction": "And?", "input": "12", "output": "No.", "history": [["Hi", "Yes."], ["Hi", "Yes."]]}
    assert turns(record) == [U, A, U, A, Turn("user", "And?\n\n12"), Turn("assistant", "No.")]
    plain = read(record, templated=False)
    assert plain == Pair("Hi\n\nYes.\n\nHi\n\nYes.\n\nAnd?\n\n12\n\n", "No.")
    assert turns({**record, "history": json.dumps(record["history"])}) == turns(record), "of a file of columns"
    assert "history must be a list of pairs of a question and its answer, found ['Hi']" in wrong({**record, "history": ["Hi"]})


@pytest.mark.parametrize(
    "record",
    [
        {"messages": said("Hi", "Yes.")},
        {"conversation": said("Hi", "Yes.", roles=("User", "ASSISTANT"))},
        {"messages": json.dumps(said("Hi", "Yes."))},
        {"dialogue": said("Hi", "Yes.", roles=("human", "Chatbot"))},
        {"prompt": said("Hi"), "completion": [{"role": "assistant", "content": "Yes."}]},
        {"prompt": said("Hi"), "completion": "Yes."},
        {"question": "Hi", "answer": "Yes."},
        {"query": "Hi", "response": "Yes."},
        {"prompt": "Hi", "response": "Yes."},
        {"instruction": "Hi", "input": None, "output": "Yes."},
        {"input": "Hi", "output": "Yes."},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                {"role": "assistant", "content": "Yes."},
            ]
        },
    ],
    ids=str,
)
def test_records_that_are_one_chat(record: Any) -> None:
    assert turns(record) == [U, A]


def test_of_a_prompt_of_turns_only_the_completion_is_learned() -> None:
    assert turns({"prompt": said("Hi", "Yes.", "Hi"), "completion": "Yes."}) == [U, OFF, U, A]


def test_a_prompt_and_its_completion_are_a_text_as_it_is() -> None:
    assert read({"prompt": "Hi ", "completion": "Yes.", "system": "Be short."}) == Pair("Hi ", "Yes.", unused=("system",))
    assert read({"prompt": "Hi ", "completion": "Yes."}, templated=True) == Chat((Turn("user", "Hi "), A))
    assert read({"instruction": "Hi", "context": "12", "response": "Yes."}, templated=False) == Pair("Hi\n\n12\n\n", "Yes.")


TOOLS: list[tuple[str, list[Any]]] = [
    ("OpenAI", [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "12"}]),
    (
        "arguments as a text",
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"where": "here"}'}}],
            },
            {"role": "tool", "content": "12"},
        ],
    ),
    ("calls as a text", [{"role": "assistant", "tool_calls": json.dumps([CALL])}, {"role": "tool", "content": "12"}]),
    (
        "bare calls",
        [
            {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {"where": "here"}}]},
            {"role": "function", "content": "12"},
        ],
    ),
    (
        "the function_call of old",
        [
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"where": "here"}'}},
            {"role": "function", "content": "12"},
        ],
    ),
    (
        "the function_call of old as a text",
        [
            {"role": "assistant", "content": None, "function_call": '{"name": "look", "arguments": {"where": "here"}}'},
            {"role": "function", "content": "12"},
        ],
    ),
    (
        "ShareGPT",
        [
            {"from": "function_call", "value": '{"name": "look", "arguments": {"where": "here"}}'},
            {"from": "observation", "value": "12"},
        ],
    ),
]


@pytest.mark.parametrize("both", [both for _, both in TOOLS], ids=[name for name, _ in TOOLS])
def test_calls_of_tools(both: list[Any]) -> None:
    assert turns({"messages": [*said("Hi"), *both]}) == [U, Turn("assistant", None, calls=(CALL,)), Turn("tool", "12")]


def test_calls_that_cannot_be_read() -> None:
    def of(**turn: Any) -> str:
        return wrong({"messages": [*said("Hi"), {"role": "assistant", **turn}]})

    assert "tool_calls of turn 2 is a text that is not valid JSON" in of(tool_calls="[{")
    assert "tool_calls of turn 2 must be a list of mappings, found 3" in of(tool_calls=3)
    assert "turn 2 has a call of a tool without a name: {'function': {}}" in of(tool_calls=[{"function": {}}])
    assert "the arguments of 'look' in turn 2 is a text that is not valid JSON" in of(
        tool_calls=[{"name": "look", "arguments": "where"}]
    )
    assert "turn 2 has no content that is text: None" in of(content=None)
    assert "function_call of turn 2 is a text that is not valid JSON" in of(content=None, function_call="look")
    assert "it has turn 2 without a content; its keys: ['role', 'text']" in of(text="Yes.")
    assert "tools must be a list of mappings, found ['look']" in wrong({"messages": said("Hi", "Yes."), "tools": ["look"]})


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "it has ['chosen', 'rejected']: these are preference data, from which"),
        ({"messages": said("Hi", "Yes."), "rejected_response": "c"}, "it has ['rejected_response']: these are preference data"),
        ({"conversations": said("Hi"), "chosen": said("", "b")[1], "rejected": said("", "c")[1]}, "preference data, from which"),
        ({"prompt": "a", "completion": "b", "label": False}, "it has label: false: these are preference data (as for KTO)"),
        ({"messages": said("Hi", "Yes."), "kto_tag": True}, "it has kto_tag: true: these are preference data (as for KTO)"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "it has label: false: these are preference data (as for KTO)"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, "These are data for a reward model"),
    ],
    ids=str,
)
def test_preferences_are_refused_by_their_name(record: Any, name: str) -> None:
    assert name in wrong(record)


def test_the_better_answers_are_examples_where_the_job_says_so() -> None:
    record = {"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}
    assert "columns: {completion: chosen}" in wrong(record)
    assert read(record, completion="chosen") == Pair("Hi", "Yes.", unused=("rejected",))
    whole = {"prompt": "Hi", "chosen": said("Hi", "Yes."), "rejected": said("Hi", "No.")}
    assert turns(whole, messages="chosen") == [U, A]
    assert isinstance(read({"question": "Hi", "answer": "Yes.", "label": 3}), Chat), "a class is no judgement"


def test_columns_and_roles_by_other_names() -> None:
    talk = [{"speaker": "customer", "says": "Hi"}, {"speaker": "agent", "says": "Yes."}]
    record = {"talk": talk, "prompt": "not it"}
    named = {"messages": "talk", "role": "speaker", "content": "says", "user": "customer", "assistant": "agent"}
    assert turns(record, **named) == [U, A]
    assert read({"ask": "Hi", "reply": "Yes.", "prompt": "not it"}, prompt="ask", completion="reply") == Pair(
        "Hi", "Yes.", unused=("prompt",)
    )
    assert turns({"messages": [said("Hi")[0], {**said("", "Yes.")[1], "learn": 0}]}, train="learn") == [U, OFF]
    assert turns({"messages": said("Hi", "Yes."), "weight": 3}, weight="") == [U, A], "a column that is not to be read"
    assert "it has no key completion (nor output, nor answer); its keys: ['ask']; columns: {prompt: ask}" in wrong(
        {"ask": "Hi"}, prompt="ask"
    )


def test_columns_that_a_job_names_come_before_all_others() -> None:
    talk = {"messages": said("M", "N"), "problem": "Hi", "solution": "Yes."}
    assert read(talk, prompt="problem", completion="solution") == Pair("Hi", "Yes.", unused=("messages",))
    assert turns({"messages": said("Hi", "Yes."), "problem": "P"}, prompt="ask", completion="reply") == [U, A], "of other records"
    assert turns({"conversations": said("M", "N"), "question": "Hi", "answer": "Yes."}, messages="") == [U, A]
    assert turns({"question": "Hi", "response": "R", "gold": "Yes."}, answer="gold") == [U, A]
    assert turns({"prompt": "X", "problem": "Hi", "output": "O", "gold": "Yes."}, question="problem", answer="gold") == [U, A]
    added = [Turn("user", "Hi\n\n12"), A]
    assert turns({"question": "Hi", "facts": "12", "answer": "Yes."}, input="facts") == added, "which a question is before"


def test_a_key_without_a_value_is_none() -> None:
    assert turns({"instruction": None, "prompt": None, "question": "Hi", "output": None, "answer": "Yes."}) == [U, A]
    assert "completion must be a text, found None" in wrong({"prompt": "Hi", "completion": None})


def test_a_prompt_that_its_completion_holds_again_does_not_stand_there_twice() -> None:
    """As in UltraFeedback, whose better answers are whole chats."""
    better = {"prompt": "Hi", "chosen": said("Hi", "Yes."), "rejected": said("Hi", "No.")}
    assert wrong(better).endswith("as examples: columns: {messages: chosen}")
    assert wrong(better, completion="chosen") == (
        "the turns of chosen hold the prompt again, 'Hi', which would stand there twice: take them as a whole chat, columns: "
        "{messages: chosen}"
    )
    assert "the turns of completion hold the prompt again" in wrong(
        {"prompt": said("Hi"), "completion": [{"role": "system", "content": "Be short."}, *said("Hi", "Yes.")]}
    )
    assert turns({"prompt": said("Hi"), "completion": [*said("", "Yes.")[1:], *said("Hi", "Yes.")]}) == [U, A, U, A]
    assert wrong({**better, "chosen": said("", "Yes.")[1:]}).endswith("columns: {completion: chosen}")
    said_so = wrong({"prompt": said("Hi"), "answer": "a"})
    assert said_so.startswith("it has no key completion, beside turns; its keys: ['answer', 'prompt']; columns gives keys")


def test_better_texts_that_hold_their_questions_are_texts() -> None:
    """As those of hh-rlhf."""
    both = {"chosen": "Human: Hi\n\nAssistant: Yes.", "rejected": "Human: Hi\n\nAssistant: No."}
    assert wrong(both).endswith("as examples: columns: {text: chosen}")
    assert kind_of_record(both, Columns({"text": "chosen"})) == "text"


def test_a_turn_has_one_thought() -> None:
    def thought(**keys: str) -> Any:
        return {"messages": [*said("Hi"), {"role": "assistant", "content": "Yes.", **keys}]}

    for keys in ({"reasoning_content": "", "reasoning": "Hm."}, {"reasoning": "Hm.", "reasoning_content": "Hm."}):
        assert turns(thought(**keys)) == [U, A._replace(thought="Hm.")]
    assert "turn 2 has several thoughts, {'reasoning': 'Oh.', 'thinking': 'Hm.'}. Leave one" in wrong(
        thought(reasoning="Oh.", thinking="Hm.")
    )


def test_columns_that_cannot_be(tmp_path: Path) -> None:
    folder, file = tokenizer(tmp_path / "words"), lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    for columns, what in (
        ({"promt": "a"}, "columns has the unknown name 'promt'; did you mean 'prompt'?"),
        ("a", "columns must be a mapping, such as"),
        ({"system": "who"}, "columns.system is 'who', but no record has this key"),
        ({"prompt": 3}, "columns.prompt must be the name of a"),
    ):
        assert what in refusal(instructions, file=file, tokenizer=folder, columns=columns)


def test_the_kind_of_a_record() -> None:
    plain = Columns()
    records: list[Any] = [
        {"messages": []},
        {"prompt": [], "completion": "b"},
        {"instruction": "a"},
        {"answer": "b"},
        {"text": "a"},
        {"words": "a"},
    ]
    kinds = ["chat", "chat", "instructions", "instructions", "text", None]
    assert [kind_of_record(record, plain) for record in records] == kinds


def heard(caplog: pytest.LogCaptureFixture, call: Any, **options: Any) -> list[str]:
    logger = logging.getLogger("hetpipe")
    caplog.clear()
    logger.addHandler(caplog.handler)
    try:
        call(test_fraction=0, **options)
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.messages


def test_keys_that_nothing_reads_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of records, of turns where the template does not write them, and of options that it does not ask for."""
    named = chats.CHATML.replace("{{ m.role }}", "{{ m.name or m.role }}")
    folder = tokenizer(tmp_path / "words", "{% if deep %}deep{% endif %}" + named)
    one, two, three = chat_of("Hi", "Yes."), chat_of("Hi", "No.", source="a", id=1), chat_of("Hi", "Yes.", id=2, note=None)
    one["messages"][0]["name"], two["messages"][1]["rating"] = "Ann", 5
    three["chat_template_kwargs"] = {"deep": True, "wide": True}
    file = lines(tmp_path / "a.jsonl", [one, two, three])
    assert heard(caplog, chat, file=file, tokenizer=folder) == [
        (
            f"note: of {file}, nothing reads the keys (each in so many records) id (2), chat_template_kwargs.wide (1), "
            "rating of a turn (1), source (1)"
        )
    ]
    its = AutoTokenizer.from_pretrained(folder)
    data = chat(file, folder, test_fraction=0).train
    texts = [str(its.decode(data[i][0])) for i in range(3)]
    assert texts[0].startswith("<|im_start|>Ann\nHi")
    assert texts[2].startswith("deep<|im_start|>user")


def test_options_of_a_record_that_are_not_its_to_say() -> None:
    for key in ("tools", "conversations", "return_assistant_tokens_mask"):
        assert f"chat_template_kwargs has {key!r}, which a record cannot set" in wrong(
            {"messages": said("Hi", "Yes."), "chat_template_kwargs": {key: []}}
        )
