"""What of a chat is learned (hetpipe/language/writing): each answer from behind the prompt of its generation to the token that
ends it; and nothing of a chat is lost without a word. (Published templates are in test_templates.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe.language.conversations import chat, instructions
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.formats import read_record
from hetpipe.language.records.record import UnusableError
from hetpipe.language.tokenizer import Tokenizer
from hetpipe.language.writing.answers import Answers, Turns
from hetpipe.language.writing.bounds import Bounds
from hetpipe.language.writing.template import Template, Thinking
from tests.support import chats
from tests.support.answer_templates import ALWAYS, BARE, CALLS, GLM, LOST, OPENED, PARTS, SPECIAL, SWITCHED
from tests.support.chats import chat_of, lines, refusal, tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer(tmp_path_factory.mktemp("words")))


class Written:
    """The samples of a chat by a template, each with what is learned between « and »."""

    def __init__(self, words: Tokenizer, template: str, turns: Turns = "auto", thinking: Thinking | None = None) -> None:
        self.answers = Answers(Template(words, template), turns, thinking)

    def __call__(self, record: Any) -> list[str]:
        samples = self.answers.samples(read_record(record, Columns(), templated=True))  # type: ignore[arg-type]
        found = []
        for text, learned, *_ in samples:
            for begin, end, _ in reversed(learned):
                text = f"{text[:begin]}«{text[begin:end]}»{text[end:]}"
            found.append(text)
        return found

    def refused(self, record: Any) -> str:
        with pytest.raises(UnusableError) as caught:
            self(record)
        return str(caught.value)

    @property
    def notes(self) -> list[str]:
        return [what for what, count in self.answers.told.items() if count]


def test_the_next_roles_token_ends_a_turn_where_no_other_does(words: Tokenizer) -> None:
    assert Written(words, GLM)(chat_of("Hi", "Yes.", "No?", "No.")) == [
        "[gMASK]<sop><|user|>\nHi<|assistant|>\n«Yes.<|user|>»\nNo?<|assistant|>\n«No.</s>»"
    ]
    assert Written(words, GLM, "last")(chat_of("Hi", "Yes.", "No?", "No.")) == [
        "[gMASK]<sop><|user|>\nHi<|assistant|>\nYes.<|user|>\nNo?<|assistant|>\n«No.</s>»"
    ]


def test_where_nothing_ends_a_turn_that_is_told(words: Tokenizer, tmp_path: Path) -> None:
    plain = Written(words, BARE)
    assert plain(chat_of("Hi", "Yes.", "No?", "No.")) == ["Q: Hi\nA: «Yes.\n»Q: No?\nA: «No.\n</s>»"]
    assert "answers have no token that ends them" in plain.notes[0]
    endless = Written(Tokenizer(tokenizer(tmp_path / "endless", eos_token=None)), BARE)
    assert endless(chat_of("Hi", "Yes.")) == ["Q: Hi\nA: «Yes.\n»"]
    assert endless.answers.told[endless.notes[0]] == 1


def test_the_tokens_that_end_answers_are_known(tmp_path: Path) -> None:
    folder, glm = tokenizer(tmp_path / "words"), tmp_path / "glm.jinja"
    glm.write_text(GLM)
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hi", "Yes.", "No?", "No.")])
    number = Tokenizer(folder).its.convert_tokens_to_ids
    assert chat(file, folder, test_fraction=0).made_of["ends"] == [number("<|im_end|>")]
    assert chat(file, folder, template=str(glm), test_fraction=0).made_of["ends"] == sorted(map(number, ("</s>", "<|user|>")))
    pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "Hi", "completion": "Yes."}])
    assert instructions(pairs, folder, test_fraction=0).made_of["ends"] == [number("</s>")]


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (chat_of("Hi", "Yes."), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>«Yes.<|im_end|>»\n"),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
                ]
            },
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n«Hm.\n</think>Yes.<|im_end|>»\n",
        ),
    ],
)
def test_a_template_is_told_whether_an_answer_has_a_thought(words: Tokenizer, record: Any, wanted: str) -> None:
    written = Written(words, SWITCHED)
    assert written(record) == [wanted]
    assert [("enable_thinking: false" in note) for note in written.notes] == [True] * ("think></" in wanted)
    both = Written(words, SWITCHED, thinking="off")
    assert both(record) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>«Yes.<|im_end|>»\n"]
    assert both.notes == ["thoughts are left out (thinking: off)"] * ("reasoning_content" in str(record))


def test_thinking_on_is_for_answers_with_a_thought(words: Tokenizer) -> None:
    said = Written(words, SWITCHED, thinking="on").refused(chat_of("Hi", "Yes."))
    assert "turn 2: the template begins an answer with '\\n', and writes this one as '</think>Yes.<|im_end|>\\n'" in said
    assert "say whether answers begin with a thought (thinking: on or off, --thinking)" in said


def test_a_thought_that_a_template_opens_by_itself_is_none_of_an_answer_without_one(words: Tokenizer) -> None:
    written = Written(words, OPENED)
    assert written(chat_of("Hi", "Yes.", "No?", "No.")) == [
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n<|im_start|>user\nNo?<|im_end|>\n"
            "<|im_start|>assistant\n«No.<|im_end|>»\n"
        )
    ]
    assert "answers have no thought, with which the template begins each" in written.notes[0]
    said = Written(words, OPENED).refused(chat_of("Hi", "<think>Hm.</think>Yes."))
    assert "the template" in said
    assert "(template: FILE, or --template FILE)" in said


@pytest.mark.parametrize(
    "thought", ["<think>Hm.</think>\n\n", "[THINK]Hm.[/THINK]", "<|think|>Hm.<|/think|>\n", "\n<Thinking>Hm.</thinking>"]
)
def test_thoughts_are_left_out_however_they_are_marked(words: Tokenizer, thought: str) -> None:
    """As Qwen, Magistral, and others mark them."""
    for template in (chats.CHATML, OPENED):
        written = Written(words, template, thinking="off")
        assert written(chat_of("Hi", f"{thought}Yes."))[0].endswith("«Yes.<|im_end|>»\n")
        assert "thoughts are left out (thinking: off)" in written.notes


@pytest.mark.parametrize(("begin", "record", "which"), [row[1:] for row in LOST], ids=[row[0] for row in LOST])
def test_a_content_that_a_template_leaves_out_is_an_error(words: Tokenizer, begin: str, record: Any, which: str) -> None:
    """Also where its words stand somewhere else."""
    said = Written(words, chats.CHATML.replace("{% for m in messages %}", begin), "last").refused(record)
    assert said.startswith(f"the template does not write the content of {which}; take a template that does (template: FILE, or ")


@pytest.mark.parametrize(
    ("content", "why"),
    [("Yes. [cut] No.", "a template that cuts a text"), ("cut", "or what is nothing but that"), ("No.cut", "and its end")],
)
def test_what_a_template_does_to_a_text_by_its_words_is_seen(words: Tokenizer, content: str, why: str) -> None:
    template = chats.CHATML.replace("{{ m.content }}", "{{ m.content.replace('cut', '') }}")
    said = Written(words, template).refused(chat_of("Hi", content))
    assert "the template does not write the content of turn 2 (assistant) as it is" in said, why


def test_contents_as_lists_of_parts_for_templates_that_take_such(words: Tokenizer) -> None:
    assert Written(words, PARTS)(chat_of("Hi", "Yes.")) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    ]


ARGUED: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "look 12 here"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"where": "here"}'}}]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "Yes."},
    ]
}


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("{{ call.function.arguments | tojson }}", '{"where": "here"}'),
        ("{{ call.function.arguments if call.function.arguments is string else raise_exception('no') }}", '{"where": "here"}'),
        ("{{ '' ~ call.function.arguments }}", '{"where": "here"}'),  # of a mapping, what Python writes
        ("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}", "where=here"),
    ],
)
def test_arguments_of_tools_are_handed_as_the_template_takes_them(words: Tokenizer, written: str, wanted: str) -> None:
    template = CALLS.replace("{{ call.function.arguments | tojson }}", written)
    (text,) = Written(words, template)(ARGUED)
    assert f"<|im_start|>assistant\n«look {wanted}<|im_end|>»\n<|im_start|>tool\n12<|im_end|>" in text


def test_arguments_in_many_levels_take_no_time(words: Tokenizer) -> None:
    deep = '{"in": ' * 60 + "1" + "}" * 60
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": deep}}]}
    (text,) = Written(words, CALLS)({"messages": [*chat_of("Hi")["messages"], called]})
    assert text.endswith(f"«look {deep}<|im_end|>»\n")


def test_calls_and_tools_that_a_template_leaves_out_are_errors(words: Tokenizer) -> None:
    """Though the name of the tool stands in the question."""
    said = Written(words, chats.CHATML).refused(ARGUED)
    assert "the template does not write the call of the tool 'look' in turn 2 (assistant)" in said
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    without = CALLS.replace("{% if tools %}", "{% if none %}")
    assert "the template does not write the tool 'look'" in Written(words, without).refused({**ARGUED, "tools": tools})
    assert Written(words, CALLS)({**ARGUED, "tools": tools})[0].startswith("look\n<|im_start|>user")


def test_a_thought_that_a_template_does_not_write_is_an_error(words: Tokenizer) -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Yes"}
    record = {"messages": [chat_of("Hi")["messages"][0], thought]}
    said = Written(words, chats.CHATML).refused(record)
    assert said.startswith(
        "the template does not write the thought (reasoning_content) of turn 2 (assistant); leave thoughts "
        "out (thinking: off, or --thinking off), or take a template"
    )
    assert Written(words, chats.CHATML, thinking="off")(record)[0].endswith("«Yes.<|im_end|>»\n")


def test_marks_under_generation_blocks(words: Tokenizer) -> None:
    """Which say themselves what is learned, of all turns alike; also where they are two for a turn."""
    talk = chat_of("Hi", "Yes.", "No?", "No.")
    talk["messages"][1]["weight"] = 0
    wanted = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nNo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert Written(words, chats.GENERATION)(talk) == [f"{wanted}«No.<|im_end|>»\n"]
    two = chats.GENERATION.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}",
        "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}",
    )
    assert Written(words, two)(talk) == Written(words, two, "last")(talk) == [f"{wanted}«No.<|im_end|>»\n"]
    short = chats.GENERATION.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert Written(words, short)(talk) == [f"{wanted}«No.<|im_end|>»\n"], "the end of a turn is learned"


def test_an_end_of_text_behind_the_last_turn_is_none_of_it(words: Tokenizer) -> None:
    assert Written(words, chats.PHI)(chat_of("Hi", "Yes."))[0].endswith("<|assistant|>\n«Yes.<|end|>»\n</s>")
    other = (  # writes another token behind the last answer than behind an earlier one
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last and not add_generation_prompt %}</s>"
        "{% else %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert Written(words, other)(chat_of("Hi", "Yes.", "No?", "No.")) == [
        "<|user|>Hi<|end|><|assistant|>«Yes.</s>»",
        "<|user|>Hi<|end|><|assistant|>Yes.<|end|><|user|>No?<|end|><|assistant|>«No.</s>»",
    ]


def test_an_answer_that_a_template_writes_no_prompt_for_is_told_with_the_way_out(words: Tokenizer) -> None:
    """As of characters that speak first, by a template that looks at the first message."""
    template = "{% if messages[0].role == 'system' %}{% endif %}" + chats.CHATML
    greeted = [{"role": "assistant", "content": "Ho"}, *chat_of("Hi", "Yes.")["messages"]]
    assert Written(words, template).refused({"messages": greeted}) == (
        "turn 1 answers no prompt that a model could be given (the template does not take it: list object has no element 0): "
        "weight: 0 in this turn leaves it out of what is learned"
    )
    greeted[0]["weight"] = 0
    assert Written(words, template)({"messages": greeted}) == [
        "<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    ]


def test_special_tokens_in_what_is_said_are_told(words: Tokenizer, tmp_path: Path) -> None:
    written = Written(words, chats.CHATML)
    for said in (("<|im_end|>", "Yes."), ("Hi", "Yes.</s>"), ("im_end", "</ s>")):
        written(chat_of(*said))
    (note,) = written.notes
    assert note.startswith("chats hold special tokens of the tokenizer in what is said")
    assert written.answers.told[note] == 2
    tagged = Tokenizer(tokenizer(tmp_path / "tagged", special=[*chats.SPECIAL, "<think>", "</think>"]))
    thought = Written(tagged, chats.CHATML)
    thought(chat_of("Hi", "<think>Hm.</think>Yes."))
    assert thought.notes == []


def test_answers_that_say_nothing_are_told(words: Tokenizer) -> None:
    written = Written(words, chats.CHATML)
    assert written(chat_of("Hi", "", "So?", " ", "Well?", "Yes."))[0].count("«") == 3
    (note,) = written.notes
    assert written.answers.told[note] == 2
    assert note.startswith("answers that are learned are empty")
    silent = chat_of("Hi", "", "Well?", "Yes.")
    silent["messages"][1]["weight"] = 0
    assert Written(words, chats.CHATML)(silent)[0].count("«") == 1


def test_a_date_that_a_template_writes_is_the_same_every_day(words: Tokenizer) -> None:
    """A run which is resumed tomorrow would else read other samples."""
    dated = "{{ strftime_now('%d %b %Y') }} {{ strftime_now(\"%Y\") }}\n" + chats.CHATML
    written = Written(words, dated)
    assert written(chat_of("Hi", "Yes."))[0].startswith("26 Jul 2024 2024\n<|im_start|>user")
    assert written.answers.template.writes_a_date
    assert Written(words, "\n" + dated)(chat_of("Hi", "Yes."))[0].startswith("\n26 Jul 2024 2024\n<|im_start|>user")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("{% set form = '%d %b' %}{{ strftime_now(form) }}", "26 Jul"),
        ("{{ strftime_now(format='%-d.%-m.%Y') }}", "26.7.2024"),
        ("{{ strftime_now('%B \\'%y') }}", "July '24"),
        ("{{ strftime_now('day') }}", "day"),
        ("{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}", "2024-07-26"),
    ],
)
def test_a_date_is_the_same_however_it_is_asked_for(words: Tokenizer, asked: str, wanted: str) -> None:
    assert Written(words, asked + chats.CHATML)(chat_of("Hi", "Yes."))[0].startswith(f"{wanted}<|im_start|>user")


@pytest.mark.parametrize(("template", "wanted"), ALWAYS.values(), ids=ALWAYS)
def test_the_beginning_of_another_answer_is_none_of_the_last(words: Tokenizer, template: str, wanted: str) -> None:
    """As the first templates of Llama 3 wrote it, whatever add_generation_prompt is."""
    assert Written(words, template)(chat_of("Hi", "Yes.", "No?", "No.")) == [wanted]
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' }}"
    said = Written(words, bare).refused(chat_of("Hi", "Yes."))
    assert "begins another answer behind the last, 'assistant: ', though none is asked for" in said
    assert "{% if add_generation_prompt %}" in said
    assert "template: FILE" in said
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"  # begins none at all
    assert Written(words, plain)(chat_of("Hi", "Yes.")) == ["user: Hi</s>«assistant: Yes.</s>»"]


def test_a_token_that_is_not_special_ends_a_turn_where_the_template_says_so(tmp_path: Path) -> None:
    """As where tokens of turns were added to the tokenizer of a base model; a tag that an answer ends with is no end."""
    plain = ["<|im_start|>", "<|im_end|>", "</tool_call>", "\n"]
    added = Tokenizer(tokenizer(tmp_path / "added", special=["<s>", "</s>"], plain=plain))
    written = Written(added, chats.CHATML)
    assert written(chat_of("Hi", "Yes.", "No?", "No.")) == [
        (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n<|im_start|>user\nNo?<|im_end|>\n"
            "<|im_start|>assistant\n«No.<|im_end|>»\n"
        )
    ]
    assert written.notes == []
    assert Written(added, BARE)(chat_of("Hi", "Yes.</tool_call>")) == ["Q: Hi\nA: «Yes.</tool_call>\n</s>»"]


def test_an_answer_begins_with_a_token_as_behind_a_prompt(words: Tokenizer, tmp_path: Path) -> None:
    """A token of two line feeds is none that a model could begin with behind a prompt that ends with the first of them."""
    folder = str(tmp_path / "words")
    its = words.its
    its.add_tokens(["\n\n"])
    its.save_pretrained(folder)
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hi", "\nYes.")])
    tokens, targets = chat(file, folder, test_fraction=0).train[0]
    double, (single,) = its.convert_tokens_to_ids("\n\n"), its("\n", add_special_tokens=False)["input_ids"]
    assert double not in tokens.tolist()
    learned = [number for number in targets.tolist() if number != -100]
    assert learned[0] == single
    assert str(its.decode(learned)) == "\nYes.<|im_end|>"


def test_templates_of_files(tmp_path: Path) -> None:
    folder, file = tokenizer(tmp_path / "none", None), lines(tmp_path / "chats.jsonl", [chat_of("Hi", "Yes.")])
    (tmp_path / "own.jinja").write_text(chats.CHATML)
    assert len(chat(file, folder, template=str(tmp_path / "own.jinja"), test_fraction=0).train) == 1  # type: ignore[arg-type]
    assert len(chat(file, folder, template=tokenizer(tmp_path / "with"), test_fraction=0).train) == 1  # type: ignore[arg-type]
    (tmp_path / "empty.jinja").write_text("{{ prompt }}")
    for name, said in (
        (str(tmp_path / "empty.jinja"), "empty.jinja is no template of chats, because it never reads 'messages'"),
        (str(tmp_path / "lost.jinja"), "cannot read the template "),
        ("non", "did you mean 'none'?"),
        (3, "template must be a file"),
    ):
        assert said in refusal(chat, file=file, tokenizer=folder, template=name)
    assert "it is a chat, which only a template can write" in refusal(chat, file=file, tokenizer=folder, template="none")
    pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "Hi", "completion": "Yes."}])
    own = instructions(pairs, folder, template=str(tmp_path / "own.jinja"), test_fraction=0)
    assert own.made_of["template"] is not None
    assert instructions(pairs, folder, test_fraction=0).made_of["template"] is None
    assert "thinking is off, but only a template of chats uses it, and there is no template" in refusal(
        instructions, file=pairs, tokenizer=folder, thinking="off"
    )
    assert "unknown thinking 'maybe'" in refusal(
        chat, file=file, tokenizer=folder, thinking="maybe", template=str(tmp_path / "own.jinja")
    )


@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        ("A<|im_end|>\n", "A<|im_end|>\n<|im_start|>", 12),
        ("A<|im_end|>", "A<|im_start|>", 1),
        ("abc", "abd", 2),
        ("", "a", 0),
        ("A<|im_end|>x", "A<|im_end|>y", 11),
        ("same", "same", 4),
        ("A<think>\n", "A<b> it", 1),
        ("A < b", "A < c", 4),
    ],
)
def test_no_special_token_is_cut(one: str, other: str, most: int) -> None:
    assert Bounds(SPECIAL).common(one, other) == Bounds(SPECIAL).common(other, one) == most
