"""Mistral's templates, of the first and the third version of its formats."""

from __future__ import annotations

from tests.support.templates.conversations import ARGUMENTS_JSON, CALL_ID, RESULT, TOOL_JSON, WITH_TOOLS
from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Refusal, Row, row, written_alike
from tests.support.templates.template import Template


def _with_tools() -> Row:
    return row(
        f"<s>[AVAILABLE_TOOLS] [{TOOL_JSON}][/AVAILABLE_TOOLS][INST] {WITH_TOOLS[0]}[/INST]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS_JSON}, "id": "{CALL_ID}"}}]</s>',
        f'[TOOL_RESULTS] {{"content": {RESULT}, "call_id": "{CALL_ID}"}}[/TOOL_RESULTS]',
        f" {WITH_TOOLS[1]}</s>",
        "",
    )


MISTRAL = (
    Template(
        name="mistral_v1",
        bos="<s>",
        eos="</s>",
        special=("<unk>",),
        adds_bos=True,
        chats={
            **written_alike(
                begin="<s>", ask=" [INST] {} [/INST]", answer=" {}</s>", system="<s> [INST] {system}\n\n{question} [/INST]"
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="mistral_v3",
        bos="<s>",
        eos="</s>",
        adds_bos=True,
        special=(
            "<unk>",
            "[TOOL_CALLS]",
            *(f"[{end}{what}]" for what in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for end in ("", "/")),
        ),
        chats={
            # it writes a system message with a question that nothing follows, and so in no chat that has an answer
            **written_alike(
                begin="<s>",
                ask="[INST] {}[/INST]",
                answer=" {}</s>",
                trims=True,
                system=Refusal(("template", "turn 1", "system")),
            ),
            "tools": _with_tools(),
            "thinking": NO_THOUGHT,
        },
    ),
)
