"""What the commands of `hetpipe convert` share: the option `--data`, and the text of the job that they write."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hetpipe.files.formats import read_yaml
from hetpipe.files.messages import InputError, shown
from hetpipe.files.parsing import yaml_text


def data_section(text: str | None) -> Mapping[str, Any] | None:
    """`--data` as the job's data section."""
    if text is None:
        return None
    value = read_yaml(text, f"--data {shown(text)}")
    if isinstance(value, str):
        return {"target" if ":" in value else "name": value}
    if not isinstance(value, dict):
        raise InputError(f"cannot read --data {shown(text)}; write 'module:function' or '{{name: cifar10, args: {{…}}}}'")
    return value


def job_text(job: Mapping[str, Any], output: object, trainer: str, options: Mapping[str, object]) -> str:
    """The job behind two comments: the command that trains it, and the command that converted it (`options`: "" is the file)."""
    given = [part for option, value in options.items() if value is not None for part in (option, str(value))]
    made = shlex.join(["hetpipe", "convert", trainer, *(part for part in given if part)])
    return f"# hetpipe train {output}\n# By {made}\n{yaml_text(job)}"
