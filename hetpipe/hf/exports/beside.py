"""What lies beside weights: of the base what training does not change, and of the data their tokenizer, their template of chats
and the tokens that end an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.checkpoints.training_state import LoopState, TrainerState
from hetpipe.files.hub import cached_folder
from hetpipe.files.messages import InputError, one_line, shown
from hetpipe.files.writing import write_text
from hetpipe.hf.chain import SCORE, Origin
from hetpipe.hf.hub import COMPANIONS
from hetpipe.language.tokenizer import Tokenizer
from hetpipe.language.writing.template import FILE, NONE, Template, read_template
from hetpipe.processes.environment import place
from hetpipe.processes.progress import warn

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
TEMPLATES = ("chat_template.*", "additional_chat_templates")  # a tokenizer's configuration may have one, too
WORDS = tuple(pattern for pattern in COMPANIONS if pattern not in (GENERATION, *TEMPLATES))
PAD = "pad_token_id"
SIZES = ("bos_token_id", "eos_token_id", PAD)
DATA = "data.args."


class Words(NamedTuple):
    """What the data of a run were written with: the name of their tokenizer and the file of their template, where they are
    said, digests of both, and the tokens that end what is learned."""

    tokenizer: str | None
    template: str | None
    digests: tuple[str | None, str | None] = (None, None)
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, state: TrainerState | LoopState) -> Words | None:
        """Return nothing for data without a tokenizer, or of which a checkpoint says nothing."""
        said: Mapping[str, Any] = (state.job if isinstance(state, TrainerState) else None) or {}
        names = (said.get(f"{DATA}{key}") for key in ("tokenizer", "template"))
        named, template = (name if isinstance(name, str) else None for name in names)
        if (data := state.data) is not None and data.tokenizer is not None:
            return cls(named, template, (data.tokenizer, data.template), data.ends)
        return cls(named, template) if named is not None else None


def write_beside(target: Path, origin: Origin | None, state: TrainerState | LoopState, *, whole: bool) -> None:
    """Write into `target`, beside the weights, the other files of a `whole` model's folder, and the tokenizer and template of
    the data. If one of these has changed since training, a note says so and it is left out. `origin`: of a model of
    transformers."""
    base, words = origin.folder.path if origin is not None and origin.folder is not None else None, Words.of(state)
    if whole and base is not None:
        code = ("*.py",) if getattr(origin.model.config, "auto_map", None) else ()  # type: ignore[union-attr]
        copy_matching(base, target, (*((*WORDS, *TEMPLATES) if words is None else ()), GENERATION, *code))
    if words is None:
        return
    _write_tokenizer(target, words, base)
    scores = origin is not None and hasattr(origin.model, SCORE)
    if whole and scores:
        _write_pad(target, words.ends)
    if origin is not None and words.ends and not scores:
        _write_ends(target, origin, words.ends)


def copy_matching(source: Path, target: Path, patterns: Iterable[str] = COMPANIONS) -> None:
    """Files and folders whose names fit one of these patterns."""
    for path in sorted({p for pattern in patterns for p in source.glob(pattern)}):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)


def _write_tokenizer(target: Path, words: Words, base: Path | None) -> None:
    try:
        source = _copy_tokenizer(target, words, base)
    except InputError as error:
        warn(f"note: {target} is without a tokenizer, since that of the run's data is not at hand: {error}")
        return
    try:
        _write_template(target, words, source)
    except InputError as error:
        _remove_template(target)
        warn(
            f"note: the tokenizer in {target} is without a template of chats, since that of the run's data is not at hand: "
            f"{error}"
        )


def _copy_tokenizer(target: Path, words: Words, base: Path | None) -> Path:
    """Copy the tokenizer, and return the folder that it came from: that of its name, or the base's, which may have been moved
    together with it. InputError for the first folder if neither holds it."""
    names = [str(name) for name in (words.tokenizer, base) if name is not None]
    faults = list[InputError]()
    for name in names[: None if words.digests[0] is not None else 1]:
        try:
            source = _folder(name)
            copy_matching(source, target, WORDS)
            _name_class(target, source)
            if words.digests[0] is not None and Tokenizer(str(target)).digest != words.digests[0]:
                raise InputError(f"{source} holds another one by now")
        except InputError as error:
            _remove(target, WORDS)
            faults.append(error)
        else:
            return source
    raise faults[0] if faults else InputError("the checkpoint does not say its name")


def _name_class(target: Path, source: Path) -> None:
    """A tokenizer whose configuration does not say its class is found by the model's, which is not beside adapters."""
    file = target / TOKENIZER_CONFIG
    config = _read(file) if file.is_file() else {}
    if "tokenizer_class" not in config and not (target / "config.json").exists():
        write_text(file, _json({**config, "tokenizer_class": type(Tokenizer(str(source)).its).__name__}))


def _read(file: Path) -> dict[str, Any]:
    """Read a file in JSON whose numbers may be larger than in ours (model_max_length). InputError where it holds no mapping."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: expected a mapping, found a {type(found).__name__}")
    return found


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _folder(name: str) -> Path:
    found, _ = cached_folder(name, (*WORDS, *TEMPLATES, f"{TEMPLATES[1]}/*"), quiet=place().local_rank > 0)
    if not found.is_dir():
        raise InputError(f"there is no folder {shown(name)} (from {Path.cwd()})")
    return found


def _write_template(target: Path, words: Words, source: Path) -> None:
    """InputError where it is not the one with which chats were written."""
    if words.template in (None, NONE):
        copy_matching(source, target, TEMPLATES)
        if words.digests[1] is not None and Template(Tokenizer(str(target))).digest != words.digests[1]:
            raise InputError(f"{source} holds another one by now")
        return
    text = read_template(words.template)
    assert text is not None
    if words.digests[1] not in (None, Template.digest_of(text)):
        raise InputError(f"{words.template} holds another one by now")
    _remove_template(target)
    write_text(target / FILE, text)


def _remove(target: Path, patterns: Collection[str]) -> None:
    for path in {p for pattern in patterns for p in target.glob(pattern)}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_template(target: Path) -> None:
    _remove(target, TEMPLATES)
    file = target / TOKENIZER_CONFIG
    if file.exists():
        config = _read(file)
        if config.pop("chat_template", None) is not None:
            write_text(file, _json(config))


def _write_pad(target: Path, ends: Collection[int]) -> None:
    """Into a reward model's configuration: what its tokenizer pads with, before which transformers reads the score. Where answers
    end with that token, the score would be read too early."""
    file = target / "config.json"
    config, words = _read(file), Tokenizer(str(target)) if any(target.glob("tokenizer*")) else None
    pad = words.its.pad_token_id if words is not None else None
    if pad is not None and pad not in ends:
        write_text(file, _json({**config, PAD: pad}))
    elif config.get(PAD) is None or pad is not None:
        warn(
            f"note: the tokenizer in {target} has no token for padding that ends no answer, by which transformers finds the end "
            "of each row of a batch: score one text at a time, or give both the tokenizer and config.json another (pad_token)"
        )


def _write_ends(target: Path, origin: Origin, ends: Collection[int]) -> None:
    """Into the generation configuration: what ends an answer beside what the base knows."""
    base = origin.folder.path / GENERATION if origin.folder is not None else None
    known = _read(base) if base is not None and base.is_file() else {}
    own = {key: getattr(origin.model.config.get_text_config(), key, None) for key in SIZES}
    config = {key: value for key, value in own.items() if value is not None} | known
    was = config.get("eos_token_id")
    before = was if isinstance(was, list) else [was] if was is not None else []
    if more := sorted({*ends} - {*before}):
        write_text(target / GENERATION, _json({**config, "eos_token_id": [*before, *more]}))
