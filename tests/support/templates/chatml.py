"""Templates of others that write turns as ChatML does: Nemotron 3 Nano and LFM2."""

from __future__ import annotations

from tests.support.templates.conversations import PLAIN_BEFORE, RESULT, THOUGHT, TOOL_JSON, WITH_THOUGHT, WITH_TOOLS
from tests.support.templates.expected import NO_THOUGHT, Row, row, written_alike
from tests.support.templates.qwen import ASK, ASK_WITH_SYSTEM, THOUGHT_TOKENS, TOOL_TOKENS, XML_CALL, XML_RULES
from tests.support.templates.template import Template

NO_SYSTEM = "<|im_start|>system\n<|im_end|>\n"
NEMOTRON_TOOLS = """# Tools

You have access to the following functions:

<tools>
<function>
<name>weather</name>
<description>Says how warm it will be.</description>
<parameters>
<parameter>
<name>city</name>
<type>string</type>
<description>The name of a city.</description>
</parameter>
<parameter>
<name>days</name>
<type>integer</type>
<description>How many days ahead.</description>
</parameter>
<required>["city"]</required>
</parameters>
</function>
</tools>

"""


def _nemotron_with_tools() -> Row:
    """Without a thought, the prompt holds an empty one: the template's switch is off."""
    begin = f"<|im_start|>system\n{NEMOTRON_TOOLS}{XML_RULES}<|im_end|>\n"
    return row(
        f"{begin}{ASK.format(WITH_TOOLS[0])}<think></think>",
        f"\n{XML_CALL}\n<|im_end|>",
        f"\n<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think></think>",
        f"{WITH_TOOLS[1]}<|im_end|>",
        "\n",
    )


def _nemotron_thinking() -> Row:
    """Each answer from where its own prompt ends: with the switch off before the first, and on before the second. What the
    template writes of the chat is the same with both."""
    return row(
        f"{NO_SYSTEM}{ASK.format(PLAIN_BEFORE[0])}<think></think>",
        f"{PLAIN_BEFORE[1]}<|im_end|>",
        f"\n{ASK.format(WITH_THOUGHT[0])}<think>\n",
        f"{THOUGHT}\n</think>\n{WITH_THOUGHT[1]}<|im_end|>",
        "\n",
    )


def _lfm2_with_tools() -> Row:
    return row(
        f"<|startoftext|><|im_start|>system\nList of tools: <|tool_list_start|>[{TOOL_JSON}]<|tool_list_end|><|im_end|>\n"
        + ASK.format(WITH_TOOLS[0]),
        "<|tool_call_start|>[weather(city='Zürich', days=2)]<|tool_call_end|><|im_end|>",
        f"\n<|im_start|>tool\n<|tool_response_start|>{RESULT}<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
        f"{WITH_TOOLS[1]}<|im_end|>",
        "\n",
    )


CHATML = (
    Template(
        name="nemotron3_nano",
        bos="<s>",
        eos="<|im_end|>",
        special=("<unk>", "<|im_start|>"),
        plain=(*TOOL_TOKENS, *THOUGHT_TOKENS),
        chats={
            **written_alike(
                begin=NO_SYSTEM,
                ask=ASK + "<think></think>",
                answer="{}<|im_end|>",
                after="\n",
                system=ASK_WITH_SYSTEM + "<think></think>",
                trims=True,
            ),
            "tools": _nemotron_with_tools(),
            "thinking": _nemotron_thinking(),
        },
    ),
    Template(
        name="lfm2",
        bos="<|startoftext|>",
        eos="<|im_end|>",
        adds_bos=True,
        special=(
            "<|pad|>",
            "<|im_start|>",
            *(f"<|tool_{what}_{end}|>" for what in ("list", "call", "response") for end in ("start", "end")),
        ),
        chats={
            **written_alike(
                begin="<|startoftext|>", ask=ASK, answer="{}<|im_end|>", after="\n", system="<|startoftext|>" + ASK_WITH_SYSTEM
            ),
            "tools": _lfm2_with_tools(),
            "thinking": NO_THOUGHT,
        },
    ),
)
