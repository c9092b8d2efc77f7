"""Gemma's templates, of the first and the third: both refuse roles that do not alternate, and the first a system message."""

from __future__ import annotations

from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Refusal, written_alike
from tests.support.templates.template import Template

ASK = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"

GEMMA = tuple(
    Template(
        name=name,
        bos="<bos>",
        eos="<eos>",
        special=("<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        adds_bos=True,
        chats={
            **written_alike(begin="<bos>", ask=ASK, answer="{}<end_of_turn>", after="\n", system=system, trims=True),
            "tools": NO_TOOLS,
            "thinking": NO_THOUGHT,
        },
    )
    for name, system in (
        ("gemma", Refusal(("System role not supported",))),
        ("gemma3", "<bos>" + ASK.format("{system}\n\n{question}")),
    )
)
