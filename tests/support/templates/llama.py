"""Llama's templates: of the second, the third, and the third with tools."""

from __future__ import annotations

from tests.support.templates.conversations import ARGUMENTS_JSON, RESULT_JSON, TOOL_JSON_INDENTED, WITH_TOOLS
from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Row, row, written_alike
from tests.support.templates.template import Template

BOS = "<|begin_of_text|>"
SPECIAL = ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


def _turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


def _ask(question: str) -> str:
    return f"{_turn('user', question)}<|start_header_id|>assistant<|end_header_id|>\n\n"


def _with_tools() -> Row:
    return row(
        BOS
        + _turn("system", f"Environment: ipython\n{DATES}")
        + _ask(
            "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
            'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
            f"name and its value}}.Do not use variables.\n\n{TOOL_JSON_INDENTED}\n\n{WITH_TOOLS[0]}"
        ),
        f'{{"name": "weather", "parameters": {ARGUMENTS_JSON}}}<|eot_id|>',
        _turn("ipython", RESULT_JSON) + "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"{WITH_TOOLS[1]}<|eot_id|>",
        "",
    )


LLAMA = (
    Template(
        name="llama2",
        bos="<s>",
        eos="</s>",
        special=("<unk>",),
        adds_bos=True,
        chats={
            **written_alike(
                ask="<s>[INST] {} [/INST]",
                answer=" {} </s>",
                trims=True,
                system="<s>[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{question} [/INST]",
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="llama3",
        bos=BOS,
        eos="<|eot_id|>",
        special=SPECIAL,
        adds_bos=True,
        chats={
            **written_alike(
                begin=BOS,
                ask=_ask("{}"),
                answer="{}<|eot_id|>",
                trims=True,
                system=BOS + _turn("system", "{system}") + _ask("{question}"),
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="llama3_1",
        bos=BOS,
        eos="<|eot_id|>",
        special=(*SPECIAL, "<|eom_id|>", "<|python_tag|>"),
        adds_bos=True,
        chats={
            **written_alike(
                begin=BOS + _turn("system", DATES),
                ask=_ask("{}"),
                answer="{}<|eot_id|>",
                system=BOS + _turn("system", DATES + "{system}") + _ask("{question}"),
                trims=True,
            ),
            "tools": _with_tools(),
            "thinking": NO_THOUGHT,
        },
    ),
)
