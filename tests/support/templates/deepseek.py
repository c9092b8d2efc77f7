"""DeepSeek's templates: none reads the definitions of tools, and all leave out thoughts. Arguments of calls are JSON texts."""

from __future__ import annotations

from tests.support.templates.conversations import ARGUMENTS_JSON, RESULT, WITH_TOOLS
from tests.support.templates.expected import NO_THOUGHT, NO_TOOLS, Expected, row, written_alike
from tests.support.templates.template import Template

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
ROLES = ("<｜User｜>", "<｜Assistant｜>")
TOOL_TOKENS = (
    "<｜tool▁sep｜>",
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
)


def _chats(opened: str, call: str, result: str) -> dict[str, Expected]:
    """`opened`: what prompt and answer have in common behind the role. R1's and V3's prompts open a thought there, which their
    answers have not, and nothing switches it off."""
    return {
        **written_alike(
            begin=BOS,
            ask=f"<｜User｜>{{}}<｜Assistant｜>{opened}",
            answer=f"{{}}{EOS}",
            system=f"{BOS}{{system}}<｜User｜>{{question}}<｜Assistant｜>{opened}",
        ),
        "tools": NO_TOOLS,
        "thinking": NO_THOUGHT,
        "calls": row(
            f"{BOS}<｜User｜>{WITH_TOOLS[0]}<｜Assistant｜>{opened}",
            f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>{EOS}",
            result,
            f"{WITH_TOOLS[1]}{EOS}",
            "",
        ),
    }


CALL_V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS_JSON}\n```<｜tool▁call▁end｜>"
CALL_V3_1 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS_JSON}<｜tool▁call▁end｜>"
RESULT_V3_1 = f"<｜tool▁output▁begin｜>{RESULT}<｜tool▁output▁end｜>"
RESULT_V3 = f"<｜tool▁outputs▁begin｜>{RESULT_V3_1}<｜tool▁outputs▁end｜>"
V3, V3_1 = _chats("", CALL_V3, RESULT_V3), _chats("</think>", CALL_V3_1, RESULT_V3_1)
DEEPSEEK = tuple(
    Template(name=name, bos=BOS, eos=EOS, adds_bos=True, plain=(*ROLES, *TOOL_TOKENS, "<think>", "</think>"), chats=chats)
    for name, chats in (
        # R1's template ends a single call by no token
        ("deepseek_r1_distill", {name: expected for name, expected in V3.items() if name != "calls"}),
        ("deepseek_v3", V3),
        ("deepseek_v3_1", V3_1),
    )
)
