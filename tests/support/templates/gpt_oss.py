"""gpt-oss's template: an answer ends by another token where nothing follows, and a thought is a message of its own."""

from __future__ import annotations

from tests.support.templates.conversations import ARGUMENTS_JSON, PLAIN_BEFORE, RESULT_JSON, THOUGHT, WITH_THOUGHT, WITH_TOOLS
from tests.support.templates.expected import TODAY, Apart, Row, row, written_apart
from tests.support.templates.template import Template

RULES = f"""<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {TODAY}

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
TOOLS = """# Tools

## functions

namespace functions {

// Says how warm it will be.
type weather = (_: {
// The name of a city.
city: string,
// How many days ahead.
days?: number,
}) => any;

} // namespace functions"""
ASK = "<|start|>user<|message|>{}<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>{}<|return|>"
BEFORE = "<|start|>user<|message|>{question}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|end|>"


def _with_tools() -> Row:
    """The call ends alike whatever follows, and the only other answer is the last."""
    rules = f"{RULES}\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
    return row(
        f"{rules}<|start|>developer<|message|>{TOOLS}<|end|>{ASK.format(WITH_TOOLS[0])}",
        f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS_JSON}<|call|>",
        f"<|start|>functions.weather to=assistant<|channel|>commentary<|message|>{RESULT_JSON}<|end|><|start|>assistant",
        ANSWER.format(WITH_TOOLS[1]),
        "",
    )


def _thinking() -> Apart:
    thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    before = BEFORE.format(question=PLAIN_BEFORE[0], answer=PLAIN_BEFORE[1])
    return Apart(
        (
            row(f"{RULES}<|end|>{ASK.format(PLAIN_BEFORE[0])}", ANSWER.format(PLAIN_BEFORE[1]), ""),
            row(f"{RULES}<|end|>{before}{ASK.format(WITH_THOUGHT[0])}", thought + ANSWER.format(WITH_THOUGHT[1]), ""),
        )
    )


GPT_OSS = (
    Template(
        name="gpt_oss",
        bos="<|startoftext|>",
        eos="<|return|>",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|endoftext|>"),
        chats={
            **written_apart(
                begin=f"{RULES}<|end|>",
                ask=ASK,
                answer=ANSWER,
                before=BEFORE,
                system=f"{RULES}<|end|><|start|>developer<|message|># Instructions\n\n{{system}}\n\n<|end|>"
                + ASK.format("{question}"),
            ),
            "tools": _with_tools(),
            "thinking": _thinking(),
        },
    ),
)
