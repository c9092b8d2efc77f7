"""What every file format shares: strict pydantic models, and errors that a user can act on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hetpipe.files import limits
from hetpipe.files.limits import MOST_FILE_BYTES, MOST_YAML_BYTES
from hetpipe.files.messages import Faults, InputError, cut, listed, nearest, reason, shown, told
from hetpipe.files.parsing import ParseError, parse_json, parse_yaml
from hetpipe.files.units import BYTES_PER_SECOND, SECONDS, in_bytes, quantity, whole, whole_bytes
from hetpipe.files.writing import write_text


def _flag(value: Any) -> Any:
    """Only true and false are: in YAML 1.2 `yes` is a text."""
    if isinstance(value, bool):
        return value
    raise ValueError("Input should be a valid boolean: write true or false")


# Numbers are numbers: neither true nor "3", neither infinite nor beyond what hetpipe/files/limits.py says.
Flag = Annotated[bool, Field(strict=True), BeforeValidator(_flag)]
Number = Annotated[float, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=limits.MOST_COUNT), BeforeValidator(whole)]
Positive = Annotated[int, Field(strict=True, ge=1, le=limits.MOST_COUNT), BeforeValidator(whole)]
Samples = Annotated[int, Field(strict=True, ge=1, le=limits.MOST_BATCH), BeforeValidator(whole)]
DeviceCount = Annotated[int, Field(strict=True, ge=1, le=limits.MOST_DEVICES), BeforeValidator(whole)]
LayerNumber = Annotated[int, Field(strict=True, ge=0, le=limits.MOST_LAYERS), BeforeValidator(whole)]
Seed = Annotated[int, Field(strict=True, ge=-limits.MOST_COUNT, le=limits.MOST_COUNT), BeforeValidator(whole)]
Factor = Annotated[float, Field(strict=True, ge=0, le=limits.MOST_FACTOR)]
Price = Annotated[float, Field(strict=True, ge=0, le=limits.MOST_PRICE)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MOST_CHARACTERS)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=limits.MOST_BYTES), BeforeValidator(whole_bytes)]
Seconds = Annotated[
    float, Field(strict=True, ge=0, le=limits.MOST_SECONDS), BeforeValidator(lambda v: quantity(v, SECONDS, "10 us"))
]
BytesPerSecond = Annotated[
    float,
    Field(strict=True, ge=limits.LEAST_BYTES_PER_SECOND, le=limits.MOST_BYTES_PER_SECOND),
    BeforeValidator(lambda v: quantity(v, BYTES_PER_SECOND, "12 GB/s")),
]


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and names the nearest known one, or says what to write in place of one that people
    try (`guesses`)."""

    guesses: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = _keys(cls)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise Faults(told(unknown, lambda key: f"unknown key {shown(key)}{cls._instead_of(key)}"))
        return data

    @classmethod
    def _instead_of(cls, key: str) -> str:
        return f": {cls.guesses[key]}" if key in cls.guesses else nearest(key, _keys(cls))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without the cached properties of this one, which are those of its own values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


@cache
def _keys(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in model.model_fields.items())


def explained(error: ValidationError) -> list[str]:
    """Every fault: where, what, and what was given."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(_place(part) for part in item["loc"] if part != UNNAMED) or "top level"
        given, reason = item["input"], item.get("ctx", {}).get("error")
        if isinstance(reason, Faults):
            lines += [f"{where}: {fault}" for fault in reason.faults]
        else:
            got = f" (got {shown(given)})" if isinstance(given, str | int | float | bool) else ""
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{got}")
    return lines


UNNAMED = ""  # the tag of the kind of a union that files need not name


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


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """(`a.b`, value) of every value in mappings, below `name`."""
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in flat(inner, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


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
            larger = f"; a .json may have {in_bytes(MOST_FILE_BYTES)}" if most_bytes < MOST_FILE_BYTES else ""
            raise InputError(
                f"cannot read {path}: it has {in_bytes(size)}, more than the limit of {in_bytes(most_bytes)}{larger}"
            )
        return content.decode("utf-8-sig")
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot read {path}: {reason(error)}")) from None
