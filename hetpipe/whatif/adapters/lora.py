"""Adapters of low rank (Hu et al. 2022, "LoRA", section 4.1): beside a matrix, two of r · inputs and outputs · r numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.files.limits import MOST_WIDTH
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.hf.sizes import Matrix

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The rank, and the names of the matrices that get adapters; without names all of a layer."""

    r: int
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"r={self.r},targets={'+'.join(self.targets) or ALL_LINEAR}"

    def chosen(self, matrices: Sequence[Matrix], model: str) -> tuple[Matrix, ...]:
        """The matrices that get adapters. InputError for a target that the model lacks."""
        names = [matrix.name for matrix in matrices]
        for target in self.targets:
            if target not in names:
                raise InputError(f"--lora: {model} has no matrix {shown(target)}{nearest(target, names)}")
        return tuple(matrix for matrix in matrices if not self.targets or matrix.name in self.targets)

    def parameters(self, matrix: Matrix) -> int:
        """Numbers of a matrix's adapter."""
        return self.r * (matrix.inputs + matrix.outputs)


def parse_lora(text: str) -> Lora:
    """`r=16` or `r=16,targets=q_proj+v_proj`. InputError for anything else.

    >>> parse_lora("r=16,targets=q_proj+v_proj")
    Lora(r=16, targets=('q_proj', 'v_proj'))
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in ("r", "targets") or not value or key in given:
            why = "is given twice" if key in given else "has no value" if key in ("r", "targets") else "is not known"
            raise InputError(f"--lora {shown(text)}: {shown(key)} {why}; write 'r=16', or 'r=16,targets=q_proj+v_proj'")
        given[key] = value
    r = given.get("r", "")
    if not (r.isascii() and r.isdigit() and len(r) < 10 and 1 <= int(r) <= MOST_WIDTH):
        raise InputError(f"--lora {shown(text)}: r is a whole number from 1 to {MOST_WIDTH}, got {shown(r) if r else 'none'}")
    names = tuple(dict.fromkeys(name.strip() for name in given.get("targets", ALL_LINEAR).split("+")))
    if not all(names) or (ALL_LINEAR in names and len(names) > 1):
        raise InputError(f"--lora {shown(text)}: targets are names joined by '+', or {ALL_LINEAR}")
    return Lora(r=int(r), targets=() if names == (ALL_LINEAR,) else names)
