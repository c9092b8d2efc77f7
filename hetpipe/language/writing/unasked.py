"""Templates that begin another answer behind the last one, though none is asked for (add_generation_prompt)."""

from __future__ import annotations

from hetpipe.files.messages import shown
from hetpipe.language.records.record import UnusableError
from hetpipe.language.writing.bounds import Bounds
from hetpipe.language.writing.template import Template

WORDS = ("zq1qz", "zq2qz", "zq3qz")  # which stand nowhere else


def begun_unasked(template: Template, bounds: Bounds) -> str:
    """What a template writes of another answer behind the end of the last one; nothing where it waits to be asked. UnusableError
    where it cannot be told from the end."""
    chat = [{"role": role, "content": word} for role, word in zip(("user", "assistant", "user"), WORDS, strict=True)]
    try:
        text, followed = template.render([chat[:2], chat], (), {})
        (asked,) = template.render([chat[:2]], (), {}, prompt=True)
    except UnusableError:
        return ""
    before, _, behind = text.partition(WORDS[1])
    another = text[bounds.common(text, followed) :]
    if text != asked or not another.strip() or not before.endswith(another):
        return ""
    end = 0 if another == behind else bounds.first_end(behind)
    if end is None:
        raise UnusableError(f"the template begins another answer behind the last, {shown(another)}, though none is asked for: "
                            "write that between {% if add_generation_prompt %} and {% endif %} in a file (template: FILE, or "
                            "--template FILE)")  # fmt: skip
    return behind[end:]
