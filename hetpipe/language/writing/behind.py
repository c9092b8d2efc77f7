"""What a template writes behind an answer, found on a chat of words that stand nowhere else."""

from __future__ import annotations

from hetpipe.files.messages import shown
from hetpipe.language.records.record import UnusableError
from hetpipe.language.writing.bounds import Bounds
from hetpipe.language.writing.template import Template

WORDS = ("zq1qz", "zq2qz", "zq3qz")
CHAT = [{"role": role, "content": word} for role, word in zip(("user", "assistant", "user"), WORDS, strict=True)]


def written_behind(template: Template) -> str:
    """Return what follows the content of a last answer; nothing where the template takes no such chat."""
    try:
        (text,) = template.render([CHAT[:2]], (), {})
    except UnusableError:
        return ""
    return text.partition(WORDS[1])[2]


def begun_unasked(template: Template, bounds: Bounds) -> str:
    """What a template writes of another answer behind the end of the last one; nothing where it waits to be asked. UnusableError
    where it cannot be told from the end."""
    try:
        text, followed = template.render([CHAT[:2], CHAT], (), {})
        (asked,) = template.render([CHAT[:2]], (), {}, prompt=True)
    except UnusableError:
        return ""
    before, _, behind = text.partition(WORDS[1])
    another = text[bounds.common(text, followed) :]
    if text != asked or not another.strip() or not before.endswith(another):
        return ""
    end = 0 if another == behind else bounds.first_end(behind)
    if end is None:
        raise UnusableError(
            f"the template begins another answer behind the last, {shown(another)}, though none is asked for: "
            "write that between {% if add_generation_prompt %} and {% endif %} in a file (template: FILE, or "
            "--template FILE)"
        )
    return behind[end:]
