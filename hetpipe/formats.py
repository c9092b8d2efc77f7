"""What every file format shares: strict pydantic models, quantities with units, and errors that a user can act on."""

from __future__ import annotations

import difflib
import json
import math
import operator
import os
import re
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hetpipe import limits
from hetpipe.limits import MOST_FAULT_CHARACTERS, MOST_FILE_BYTES, MOST_LINES, MOST_YAML_BYTES
from hetpipe.parsing import ParseError, parse_json, parse_yaml

T = TypeVar("T")


class InputError(ValueError):
    """What the user gave (a file, a key, a number) is wrong. Commands print it and exit with 2."""

    exit_code = 2


def exit_code(error: BaseException) -> int:
    """The code with which a command ends after this error: the error's own, or 1."""
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


class Faults(ValueError):
    """Several faults that a validator found; each is told on a line of its own."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


def cut(text: str, most: int = MOST_FAULT_CHARACTERS) -> str:
    """The text, or its beginning and an ellipsis; without what no terminal shows."""
    text = text.encode("utf-8", "backslashreplace").decode() if not text.isascii() else text
    return text if len(text) <= most else f"{text[: most - 1]}…"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 8, 8, 8


def shown(value: Any) -> str:
    """A value as Python writes it, in a hundred characters or so."""
    try:
        return cut(_SHORT.repr(value))
    except ValueError:  # a whole number that Python does not write
        return "a number of thousands of digits"


def told(wrong: Sequence[T], tell: Callable[[T], str]) -> list[str]:
    """A fault for each of them, worded only as far as a message shows it."""
    return [tell(item) for item in wrong[:MOST_LINES]] + [""] * (len(wrong) - MOST_LINES)


def clipped(message: str) -> str:
    """A message, whoever wrote it, in at most ten lines of a thousand characters."""
    lines = message.splitlines()
    kept = lines if len(lines) <= MOST_LINES else lines[: MOST_LINES - 1]
    return "\n".join([cut(line, 1_000) for line in kept] + [f"… and {len(lines) - len(kept)} more lines"] * (kept != lines))


def listed(faults: Sequence[str]) -> str:
    """The faults as lines of a message that has one before them, each cut, and how many more there are."""
    shown_faults = faults if len(faults) < MOST_LINES else faults[: MOST_LINES - 2]
    left = len(faults) - len(shown_faults)
    return "\n".join([f"  {cut(fault)}" for fault in shown_faults] + ([f"  … and {left} more"] if left else []))


_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_BITS = {"bit": 1 / 8, "kbit": 125, "Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_RATES = {f"{unit}/s": factor for unit, factor in {**_BYTES, **_BITS}.items()}


def _quantity(value: Any, units: Mapping[str, float], example: str) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*", value)
    unit = match.group(2) if match else ""
    if match is None or (unit and unit not in units):
        raise ValueError(
            f"cannot read {shown(value)}; write a number with a unit, such as {example!r} (units: {', '.join(units)})"
        )
    try:
        return float(match.group(1)) * units.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"cannot read the number in {shown(value)}; write, for example, {example!r}") from None


def _bytes(value: Any) -> Any:
    number = _quantity(value, _BYTES, "24 GiB")
    return round(number) if isinstance(number, float) and math.isfinite(number) else _whole(number)


def _whole(value: Any) -> Any:
    """2e3 is a whole number, too (in JSON Schema as well), and so is NumPy's; true is none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)


# Numbers are numbers: neither true nor "3", neither infinite nor beyond what hetpipe/limits.py says.
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=limits.MOST_COUNT), BeforeValidator(_whole)]
Positive = Annotated[int, Field(strict=True, ge=1, le=limits.MOST_COUNT), BeforeValidator(_whole)]
Samples = Annotated[int, Field(strict=True, ge=1, le=limits.MOST_BATCH), BeforeValidator(_whole)]
DeviceCount = Annotated[int, Field(strict=True, ge=1, le=limits.MOST_DEVICES), BeforeValidator(_whole)]
LayerNumber = Annotated[int, Field(strict=True, ge=0, le=limits.MOST_LAYERS), BeforeValidator(_whole)]
Seed = Annotated[int, Field(strict=True, ge=-limits.MOST_COUNT, le=limits.MOST_COUNT), BeforeValidator(_whole)]
Factor = Annotated[float, Field(strict=True, ge=0, le=limits.MOST_FACTOR)]
Price = Annotated[float, Field(strict=True, ge=0, le=limits.MOST_PRICE)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MOST_CHARACTERS)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=limits.MOST_BYTES), BeforeValidator(_bytes)]
Seconds = Annotated[
    float, Field(strict=True, ge=0, le=limits.MOST_SECONDS), BeforeValidator(lambda v: _quantity(v, _SECONDS, "10 us"))
]
BytesPerSecond = Annotated[
    float,
    Field(strict=True, ge=limits.LEAST_BYTES_PER_SECOND, le=limits.MOST_BYTES_PER_SECOND),
    BeforeValidator(lambda v: _quantity(v, _RATES, "12 GB/s")),
]


def nearest(name: str, known: Sequence[str]) -> str:
    """`"; did you mean 'x'? known: …"`: the end of every message about a name that is not known."""
    lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(cut(name).lower(), list(lower), n=1, cutoff=0.5)
    hint = f"; did you mean {shown(lower[close[0]])}?" if close else ";"
    more = f", … ({len(known)} in all)" if len(known) > _MOST_KNOWN else ""
    return f"{hint} known: {', '.join(cut(other, 80) for other in known[:_MOST_KNOWN])}{more}"


_MOST_KNOWN = 20


def natural_key(name: str) -> list[int | str]:
    """A key to sort names by in which n2 comes before n10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = _keys(cls)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise Faults(told(unknown, lambda key: f"unknown key {shown(key)}{nearest(key, known)}"))
        return data


@cache
def _keys(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in model.model_fields.items())


def explained(error: ValidationError) -> list[str]:
    """Every fault: where, what, and what was given."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(_place(part) for part in item["loc"]) or "top level"
        given, reason = item["input"], item.get("ctx", {}).get("error")
        if isinstance(reason, Faults):
            lines += [f"{where}: {fault}" for fault in reason.faults]
        else:
            got = f" (got {shown(given)})" if isinstance(given, str | int | float | bool) else ""
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{got}")
    return lines


def _place(part: int | str) -> str:
    text = str(part)
    return cut(text if text.isprintable() else ascii(text)[1:-1], 60)


M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], data: Any, source: str, what: str) -> M:
    """`data` as a `model`; an InputError lists every fault at once, and names `source` and `what` it holds."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = explained(error)
        raise InputError(f"{source}: {len(faults)} fault(s) in this {what}\n{listed(faults)}") from None


class Document(Strict):
    """A model that lives in a YAML or JSON file of its own. `called`: what it is in messages, if not its class's name."""

    called: ClassVar[str | None] = None

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Validate `data`; an InputError lists every fault at once and names `source`."""
        if not isinstance(data, Mapping):
            found = "nothing" if data is None else f"a {type(data).__name__}"
            raise InputError(f"{source}: expected a mapping with the key 'format', found {found}")
        (expected,) = get_args(cls.model_fields["format"].annotation)
        if data.get("format", expected) != expected:
            raise InputError(f"{source}: its format is {shown(data['format'])}, expected {expected!r}")
        return validated(cls, data, source, cls.called or f"{cls.__name__.lower()} file")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a `.yaml`, `.yml` or `.json` file."""
        return cls.parse(read_mapping(path), str(path))

    def to_json(self) -> str:
        """The document as JSON text: plain numbers in SI units; keys without a value are left out."""
        return json.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the document as JSON, atomically."""
        write_text(path, self.to_json())


def read_yaml(text: str, source: str) -> Any:
    """YAML text from a command line as plain values; an InputError names `source`."""
    try:
        return parse_yaml(text)
    except ParseError as error:
        raise InputError(cut(f"cannot read {source}: it is {error}")) from None


def read_mapping(path: str | Path) -> Any:
    """The content of a YAML or JSON file as plain Python values (no tags, no code)."""
    is_json = str(path).lower().endswith(".json")
    text = read_text(path, MOST_FILE_BYTES if is_json else MOST_YAML_BYTES)
    try:
        return parse_json(text) if is_json else parse_yaml(text)
    except ParseError as error:
        raise InputError(cut(f"{path} is {error}")) from None


def read_text(path: str | Path, most_bytes: int = MOST_YAML_BYTES) -> str:
    """The content of a text file; an InputError where it cannot be read, is larger, or is no UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            size = max(os.path.getsize(path), len(content))
            larger = f"; a .json may have {MOST_FILE_BYTES}" if most_bytes < MOST_FILE_BYTES else ""
            raise InputError(f"cannot read {path}: it has {size} bytes, the most that is read are {most_bytes}{larger}")
        return content.decode("utf-8-sig")
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot read {path}: {reason(error)}")) from None


def reason(error: OSError | ValueError) -> str:
    """Why the system refuses a path."""
    return str(error.strerror) if isinstance(error, OSError) else "no file can have this name"


def check_output(path: str | Path | None, *endings: str) -> None:
    """InputError if no file can be written at `path` (None: nothing is to be), or if it has none of these endings. Called before
    the work whose result goes there; makes nothing."""
    if path is None:
        return
    target = Path(path)
    if endings and target.suffix.lower() not in endings:
        raise InputError(f"cannot write {str(path)!r}: unknown suffix {target.suffix!r}; known: {', '.join(endings)}")
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a folder; name a file in it" if os.path.isdir(target) else "no regular file"
        raise InputError(f"cannot write {path}: it is {what}")
    _probe(target.parent, target.name)


def check_folder(path: str | Path) -> None:
    """InputError if no files can be written into this folder, which need not be there yet. Makes nothing."""
    _probe(Path(path), "")


def _probe(folder: Path, name: str) -> None:
    """Try a file with such a name in the folder, or in the first that is there on the way up."""
    try:
        there = folder
        while not _is_there(there) and there != there.parent:
            there = there.parent
        handle, temporary = tempfile.mkstemp(dir=there, prefix=f".{name}.")
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot write {name}{' ' * bool(name)}into the folder {folder}: {reason(error)}")) from None
    os.close(handle)
    os.unlink(temporary)


def _is_there(path: Path) -> bool:
    """As `Path.exists`, but for links to nothing, and where the system refuses the name itself (OSError)."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(path: str | Path) -> Path:
    """The folder, made if need be; an InputError if files cannot be written there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot write into the folder {folder}: {reason(error)}")) from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a reader (or a crash) sees the old content or the new, never a part."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """As `write_text`, of bytes."""
    check_output(path)
    target = Path(path)
    make_folder(target.parent)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mode = target.stat().st_mode if target.exists() else 0o644
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
