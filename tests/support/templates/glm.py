"""GLM's templates: a turn ends where the next role's token begins, and behind the last one by the end of the text."""

from __future__ import annotations

from tests.support.templates.conversations import PLAIN_BEFORE, RESULT, THOUGHT, TOOL_JSON, WITH_THOUGHT, WITH_TOOLS
from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Row, row, written_alike
from tests.support.templates.template import Template

EOS = "<|endoftext|>"
SPECIAL = ("[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
SYSTEM = "[gMASK]<sop><|system|>\n{system}<|user|>\n{question}<|assistant|>"
NOT_THOUGHT = "\n<think></think>"
TOOLS = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{TOOL_JSON}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}
<arg_key>{{arg-key-1}}</arg_key>
<arg_value>{{arg-value-1}}</arg_value>
<arg_key>{{arg-key-2}}</arg_key>
<arg_value>{{arg-value-2}}</arg_value>
...
</tool_call>"""
CALL = """
<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Zürich</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>"""


def _with_tools() -> Row:
    return row(
        f"[gMASK]<sop><|system|>\n{TOOLS}<|user|>\n{WITH_TOOLS[0]}<|assistant|>",
        f"{NOT_THOUGHT}{CALL}<|observation|>",
        f"\n<tool_response>\n{RESULT}\n</tool_response><|assistant|>",
        f"{NOT_THOUGHT}\n{WITH_TOOLS[1]}{EOS}",
        "",
    )


def _thinking() -> Row:
    return row(
        f"[gMASK]<sop><|user|>\n{PLAIN_BEFORE[0]}<|assistant|>",
        f"{NOT_THOUGHT}\n{PLAIN_BEFORE[1]}<|user|>",
        f"\n{WITH_THOUGHT[0]}<|assistant|>",
        f"\n<think>{THOUGHT}</think>\n{WITH_THOUGHT[1]}{EOS}",
        "",
    )


GLM = (
    Template(
        name="glm4",
        eos=EOS,
        special=SPECIAL,
        chats={
            **written_alike(
                begin="[gMASK]<sop><|user|>", ask="\n{}<|assistant|>", answer="\n{}<|user|>", last=f"\n{{}}{EOS}", system=SYSTEM
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="glm4_5",
        eos=EOS,
        special=SPECIAL,
        plain=(
            "/nothink",
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        chats={
            **written_alike(
                begin="[gMASK]<sop><|user|>",
                ask="\n{}<|assistant|>",
                answer=NOT_THOUGHT + "\n{}<|user|>",
                last=f"{NOT_THOUGHT}\n{{}}{EOS}",
                system=SYSTEM,
                trims=True,
            ),
            "tools": _with_tools(),
            "thinking": _thinking(),
        },
    ),
)
