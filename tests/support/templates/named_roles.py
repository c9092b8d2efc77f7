"""Templates that write a role's name before each turn: SmolVLM, Zephyr, Granite 3 and Falcon."""

from __future__ import annotations

from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Refusal, written_alike
from tests.support.templates.template import Template

GRANITE_TURN = "<|start_of_role|>{}<|end_of_role|>{}<|end_of_text|>\n"
GRANITE_ASKS = "<|start_of_role|>assistant<|end_of_role|>"

NAMED_ROLES = (
    Template(  # takes the content of a turn as a list of parts
        name="smolvlm",
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        special=("<image>", "<fake_token_around_image>"),
        chats={
            **written_alike(
                begin="<|im_start|>",
                ask="User: {}<end_of_utterance>\nAssistant:",
                answer=" {}<end_of_utterance>",
                after="\n",
                system="<|im_start|>System: {system}<end_of_utterance>\nUser: {question}<end_of_utterance>\nAssistant:",
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(  # its roles are no tokens
        name="zephyr",
        bos="<s>",
        eos="</s>",
        special=("<unk>",),
        adds_bos=True,
        chats={
            **written_alike(
                ask="<|user|>\n{}</s>\n<|assistant|>\n",
                answer="{}</s>",
                after="\n",
                system="<|system|>\n{system}</s>\n<|user|>\n{question}</s>\n<|assistant|>\n",
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(  # writes the definitions of tools, and neither calls nor results
        name="granite3",
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        special=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        chats={
            **written_alike(
                ask=GRANITE_TURN.format("user", "{}") + GRANITE_ASKS,
                answer="{}<|end_of_text|>",
                after="\n",
                system=GRANITE_TURN.format("system", "{system}") + GRANITE_TURN.format("user", "{question}") + GRANITE_ASKS,
            ),
            "tools": Refusal(("template", "turn 2", "tool")),
            "thinking": NO_THOUGHT,
        },
    ),
    Template(  # nothing ends a turn
        name="falcon",
        eos="<|endoftext|>",
        chats={
            **written_alike(
                ask="User: {}\nFalcon:",
                answer=" {}",
                after="\n",
                last=" {}<|endoftext|>",
                end="",
                system="System: {system}\nUser: {question}\nFalcon:",
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
)
