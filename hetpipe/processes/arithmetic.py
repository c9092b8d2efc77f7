"""By which flags of torch the products of this process's cards are computed: they change both seconds and digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Arithmetic = dict[str, str | bool]  # flag → its value


def arithmetic() -> Arithmetic:
    """The flags as they are now, by their names below torch.backends."""
    return {
        "cuda.matmul.fp32_precision": _precision(torch.backends.cuda.matmul),
        "cudnn.conv.fp32_precision": _precision(getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)),
        "cudnn.benchmark": bool(torch.backends.cudnn.benchmark),
        "cudnn.deterministic": bool(torch.backends.cudnn.deterministic),
    }


def _precision(of: Any) -> str:
    """In what products of float32 are computed; torch before 2.9 only says whether TF32 is allowed."""
    found = getattr(of, "fp32_precision", None)
    return str(found) if found is not None else "tf32" if of.allow_tf32 else "ieee"


@contextmanager
def computing_by(
    *, tf32: bool | None = None, cudnn_benchmark: bool | None = None, cudnn_deterministic: bool | None = None
) -> Iterator[None]:
    """In here the flags are these (None: as they are); afterwards they are as they were."""
    before, wanted = arithmetic(), {"cudnn.benchmark": cudnn_benchmark, "cudnn.deterministic": cudnn_deterministic}
    products = None if tf32 is None else "tf32" if tf32 else "ieee"
    for name in before:
        _set(name, products if name.endswith("fp32_precision") else wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | bool | None) -> None:
    """Let a flag have this value; None: leave it."""
    if value is None:
        return
    *path, last = name.split(".")
    of: Any = torch.backends
    for part in path:
        of = getattr(of, part, of)  # torch before 2.9 has the flags of convolutions beside those of cuDNN
    if last == "fp32_precision" and not hasattr(of, last):
        of.allow_tf32 = value == "tf32"
    else:
        setattr(of, last, value)


def other_flags(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """What is said of flags that were others when a profile was measured; empty where none was.

    >>> other_flags({"cudnn.benchmark": True}, {"cudnn.benchmark": False, "cudnn.deterministic": False})
    'torch.backends.cudnn.benchmark was True, and is False now'
    """
    return "; ".join(
        f"torch.backends.{name} was {then[name]}, and is {value} now"
        for name, value in now.items()
        if name in then and then[name] != value
    )
