"""By which flags of torch the products of this process's cards are computed: they change both seconds and digits."""

from __future__ import annotations

from collections.abc import Mapping
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
