"""Quantities with units, as people write them (24 GiB, 3 GB/s, 10 us) and read them (23.4 GiB, 1.23 ms)."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

from hetpipe.files.messages import shown

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS = {"bit": 1 / 8, "kbit": 125, "Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9}
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BYTES_PER_SECOND = {f"{unit}/s": factor for unit, factor in {**BYTES, **_BITS}.items()}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECOND_UNITS = (  # name, seconds, used from
    ("h", 3600.0, 7200.0),
    ("min", 60.0, 120.0),
    ("s", 1.0, 1.0),
    ("ms", 1e-3, 1e-3),
    ("µs", 1e-6, 1e-6),
)


def quantity(value: Any, units: Mapping[str, float], example: str) -> Any:
    """A text such as `example` in SI units; anything but a text as it is."""
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


def whole_bytes(value: Any) -> Any:
    """24 GiB as a whole number of bytes."""
    number = quantity(value, BYTES, "24 GiB")
    return round(number) if isinstance(number, float) and math.isfinite(number) else whole(number)


def whole(value: Any) -> Any:
    """2e3 is a whole number, too (in JSON Schema as well), and so is NumPy's; true is none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)


def three_digits(x: float) -> str:
    """1.50, 23.4, 1234, ∞."""
    if not math.isfinite(x):
        return "∞" if x > 0 else "unknown"
    x = float(f"{x:.3g}") if abs(x) < 1000 else round(x)
    decimals = 2 - math.floor(math.log10(abs(x))) if x else 0
    return f"{x:.{min(max(decimals, 0), 2)}f}"


def human_bytes(size: float, beside: float = 0.0) -> str:
    """Bytes in binary units, three digits: `1.50 KiB`, `23.4 GiB`; in the unit of what stands `beside` them, if that is more.

    >>> human_bytes(1000 * 2**10), human_bytes(1000 * 2**10, beside=2**20)
    ('1000 KiB', '0.98 MiB')
    """
    x, most, unit = float(size), max(abs(size), beside), 0
    while most >= 1024 and unit < len(_BYTE_UNITS) - 1:
        x, most, unit = x / 1024, most / 1024, unit + 1
    return f"{x:.0f} B" if unit == 0 else f"{three_digits(x)} {_BYTE_UNITS[unit]}"


def in_bytes(size: float, *, up: bool = False) -> str:
    """What is needed, has or misses: few bytes to the byte, many in binary units of three digits, rounded `up` where it is to be
    enough.

    >>> in_bytes(4100), in_bytes(80856049259), in_bytes(80856049259, up=True)
    ('4100 bytes', '75.3 GiB', '75.4 GiB')
    """
    if abs(size) < 2**20:
        return f"{size:.0f} bytes"
    if not up:
        return human_bytes(size)
    unit = 2 ** (10 * int(math.log2(size) // 10))
    step = 10.0 ** (math.floor(math.log10(size / unit)) - 2)
    return human_bytes(math.ceil(size / unit / step - 1e-9) * step * unit)


def human_seconds(seconds: float) -> str:
    """Seconds in the unit that fits, three digits: `1.23 ms`, `45.0 s`, `2.50 h`."""
    if not math.isfinite(seconds):
        return three_digits(seconds)
    x = float(f"{seconds:.3g}")
    if x == 0:
        return "0 s"
    for unit, factor, least in _SECOND_UNITS:
        if abs(x) >= least:
            return f"{three_digits(x / factor)} {unit}"
    return f"{three_digits(x / 1e-9)} ns"
