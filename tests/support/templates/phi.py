"""Phi's templates: they put the end of a text behind the last turn, which is no part of it."""

from __future__ import annotations

from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, written_alike
from tests.support.templates.template import Template

EOS = "<|endoftext|>"
SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

PHI = (
    Template(
        name="phi3",
        bos="<s>",
        eos=EOS,
        special=("<unk>", *SPECIAL),
        swallows=True,
        chats={
            **written_alike(
                ask="<|user|>\n{}<|end|>\n<|assistant|>\n",
                answer="{}<|end|>",
                after="\n",
                end=f"\n{EOS}",
                system="<|system|>\n{system}<|end|>\n<|user|>\n{question}<|end|>\n<|assistant|>\n",
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
    Template(
        name="phi4_mini",
        bos=EOS,
        eos=EOS,
        special=SPECIAL,
        plain=("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        chats={
            **written_alike(
                ask="<|user|>{}<|end|><|assistant|>",
                answer="{}<|end|>",
                end=EOS,
                system="<|system|>{system}<|end|><|user|>{question}<|end|><|assistant|>",
            ),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    ),
)
