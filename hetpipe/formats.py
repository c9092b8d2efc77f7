"""What every file format shares: strict pydantic models, quantities with units, and errors that a user can act on."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


class InputError(ValueError):
    """What the user gave (a file, a key, a number) is wrong. Commands print it and exit with 2."""

    exit_code = 2


_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_BITS = {"bit": 1 / 8, "kbit": 125, "Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_RATES = {f"{unit}/s": factor for unit, factor in {**_BYTES, **_BITS}.items()}


def _quantity(value: Any, units: Mapping[str, float], example: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*", value)
    unit = match.group(2) if match else ""
    if match is None or (unit and unit not in units):
        raise ValueError(
            f"cannot read {value!r}; write a number with a unit, such as {example!r} (units: {', '.join(units)})"
        )
    try:
        return float(match.group(1)) * units.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"cannot read the number in {value!r}; write, for example, {example!r}") from None


def _bytes(value: Any) -> Any:
    number = _quantity(value, _BYTES, "24 GiB")
    return round(number) if isinstance(number, float) else number


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(lambda v: _quantity(v, _SECONDS, "10 us")), Field(ge=0)]
BytesPerSecond = Annotated[float, BeforeValidator(lambda v: _quantity(v, _RATES, "12 GB/s")), Field(gt=0)]


def nearest(name: str, known: Sequence[str]) -> str:
    """`"; did you mean 'x'? known: …"`: the end of every message about a name that is not known."""
    lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known)}"


def natural_key(name: str) -> list[int | str]:
    """A key to sort names by in which n2 comes before n10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = _keys(cls)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise ValueError("; ".join(f"unknown key {key!r}{nearest(key, known)}" for key in unknown))
        return data


@cache
def _keys(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _explain(error: ValidationError) -> str:
    """Every fault on a line of its own: where, what, and what was given."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "top level"
        message = item["msg"].removeprefix("Value error, ")
        given = item["input"]
        shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"{where}: {message}{shown}")
    return "\n".join(f"  {line}" for line in lines)


M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], data: Any, source: str, what: str) -> M:
    """`data` as a `model`; an InputError lists every fault at once, and names `source` and `what` it holds."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(
            f"{source}: {error.error_count()} fault(s) in this {what}\n{_explain(error)}"
        ) from None


class Document(Strict):
    """A model that lives in a YAML or JSON file of its own."""

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Validate `data`; an InputError lists every fault at once and names `source`."""
        if not isinstance(data, Mapping):
            found = "nothing" if data is None else f"a {type(data).__name__}"
            raise InputError(f"{source}: expected a mapping with the key 'format', found {found}")
        (expected,) = get_args(cls.model_fields["format"].annotation)
        if data.get("format", expected) != expected:
            raise InputError(f"{source}: its format is {data['format']!r}, expected {expected!r}")
        return validated(cls, data, source, f"{cls.__name__.lower()} file")

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


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number (YAML 1.1, PyYAML's, takes it for text) and no key stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str) -> Any:
    """YAML text as plain Python values (no tags, no code); yaml.YAMLError where it is none."""
    return yaml.load(text, _Loader)  # a SafeLoader


def read_mapping(path: str | Path) -> Any:
    """The content of a YAML or JSON file as plain Python values (no tags, no code)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {path}: {reason}") from None
    try:
        return json.loads(text) if str(path).endswith(".json") else read_yaml(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"{path} is not valid {'JSON' if str(path).endswith('.json') else 'YAML'}: {error}"
        ) from None


def make_folder(path: str | Path) -> Path:
    """The folder, made if need be; an InputError if files cannot be written there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise InputError(f"cannot write into the folder {folder}: {error.strerror}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a reader (or a crash) sees the old content or the new, never a part."""
    target = Path(path)
    make_folder(target.parent)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = target.stat().st_mode if target.exists() else 0o644
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
