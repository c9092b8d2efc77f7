"""Qwen's templates: ChatML, with tools from Qwen2.5 on, and with thoughts in Qwen3 and later ones."""

from __future__ import annotations

from tests.support.templates.conversations import (
    ARGUMENTS_JSON,
    PLAIN_BEFORE,
    RESULT,
    THOUGHT,
    TOOL_JSON,
    WITH_THOUGHT,
    WITH_TOOLS,
)
from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Apart, Expected, Row, row, written_alike, written_apart
from tests.support.templates.template import Template

SPECIAL = ("<|endoftext|>", "<|im_start|>")
THOUGHT_TOKENS = ("<think>", "</think>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ASK_WITH_SYSTEM = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
ANSWERED = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"  # when more follows
OWN_2 = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
OWN_2_5 = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{TOOL_JSON}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS_JSON}}}\n</tool_call><|im_end|>'
RESULT_TURN = f"<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
FINAL = f"{WITH_TOOLS[1]}<|im_end|>"
NOT_THOUGHT = "<think>\n\n</think>\n\n"

XML_TOOLS = f"""# Tools

You have access to the following functions:

<tools>
{TOOL_JSON}
</tools>

"""
XML_RULES = """If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about function calls
</IMPORTANT>"""  # noqa: E501 (lines of templates)
XML_CALL = """<tool_call>
<function=weather>
<parameter=city>
Zürich
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""


def _with_tools(begin: str) -> Row:
    """`begin` is the system message with the tools."""
    return row(begin + ASK.format(WITH_TOOLS[0]), CALL, f"\n{RESULT_TURN}", FINAL, "\n")


def _qwen3_with_tools() -> Apart:
    """A call without a thought has an empty one where it is the last turn, and none where its result follows."""
    begin = f"<|im_start|>system\n{TOOLS}<|im_end|>\n" + ASK.format(WITH_TOOLS[0])
    return Apart((row(begin, NOT_THOUGHT + CALL, "\n"), row(f"{begin}{CALL}\n{RESULT_TURN}", NOT_THOUGHT + FINAL, "\n")))


def _qwen3_thinking(opened: str, opened_for_thoughts: str) -> Apart:
    """`opened`: what the generation prompt has of a thought, before an answer without one and with one."""
    plain, thought = NOT_THOUGHT.removeprefix(opened), f"<think>\n{THOUGHT}\n</think>\n\n".removeprefix(opened_for_thoughts)
    before = ANSWERED.format(question=PLAIN_BEFORE[0], answer=PLAIN_BEFORE[1])
    return Apart(
        (
            row(ASK.format(PLAIN_BEFORE[0]) + opened, f"{plain}{PLAIN_BEFORE[1]}<|im_end|>", "\n"),
            row(before + ASK.format(WITH_THOUGHT[0]) + opened_for_thoughts, f"{thought}{WITH_THOUGHT[1]}<|im_end|>", "\n"),
        )
    )


def _qwen3_5(opened: str) -> dict[str, Expected]:
    """`opened`: what the generation prompt has of a thought where nothing says whether there is one."""
    begin = f"<|im_start|>system\n{XML_TOOLS}{XML_RULES}<|im_end|>\n"
    rest = NOT_THOUGHT.removeprefix(opened)
    return {
        **written_apart(
            ask=ASK + opened,
            answer=rest + "{}<|im_end|>",
            after="\n",
            before=ANSWERED,
            trims=True,
            system=ASK_WITH_SYSTEM + opened,
        ),
        "tools": row(
            begin + ASK.format(WITH_TOOLS[0]) + opened,
            f"{rest}{XML_CALL}<|im_end|>",
            f"\n{RESULT_TURN}{opened}",
            rest + FINAL,
            "\n",
        ),
        "thinking": _qwen3_thinking(opened, "<think>\n"),
    }


QWEN = (
    Template(
        name="qwen2",
        eos="<|im_end|>",
        special=SPECIAL,
        chats={
            **written_alike(begin=OWN_2, ask=ASK, answer="{}<|im_end|>", after="\n", system=ASK_WITH_SYSTEM),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="qwen2_5",
        eos="<|im_end|>",
        special=SPECIAL,
        plain=TOOL_TOKENS[:2],
        chats={
            **written_alike(
                begin=f"<|im_start|>system\n{OWN_2_5}<|im_end|>\n",
                ask=ASK,
                answer="{}<|im_end|>",
                after="\n",
                system=ASK_WITH_SYSTEM,
            ),
            "tools": _with_tools(f"<|im_start|>system\n{OWN_2_5}\n\n{TOOLS}<|im_end|>\n"),
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="qwen3_2507",
        eos="<|im_end|>",
        special=SPECIAL,
        plain=(*TOOL_TOKENS, *THOUGHT_TOKENS),
        chats={
            **written_alike(ask=ASK, answer="{}<|im_end|>", after="\n", system=ASK_WITH_SYSTEM),
            "tools": _with_tools(f"<|im_start|>system\n{TOOLS}<|im_end|>\n"),
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="qwen3",
        eos="<|im_end|>",
        special=SPECIAL,
        plain=(*TOOL_TOKENS, *THOUGHT_TOKENS),
        chats={
            **written_apart(ask=ASK, answer=NOT_THOUGHT + "{}<|im_end|>", after="\n", before=ANSWERED, system=ASK_WITH_SYSTEM),
            "tools": _qwen3_with_tools(),
            "thinking": _qwen3_thinking("", ""),
        },
    ),
    *(
        Template(name=name, eos="<|im_end|>", special=SPECIAL, plain=(*TOOL_TOKENS, *THOUGHT_TOKENS), chats=_qwen3_5(opened))
        for name, opened in (("qwen3_5_think", "<think>\n"), ("qwen3_6", "<think>\n"), ("qwen3_5_nothink", NOT_THOUGHT))
    ),
)
