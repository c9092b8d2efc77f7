"""Adapters of low rank (Hu et al. 2022, "LoRA", section 4.1): beside a matrix, two of r · inputs and outputs · r numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from hetpipe.documents.sections.adapter import ALL_LINEAR, NO_LORA, AdapterSection, parse_lora
from hetpipe.files.formats import explained
from hetpipe.files.limits import MOST_WIDTH
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.hf.sizes import Matrix


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


def lora_of(text: str) -> Lora | None:
    """The adapters that a command's `--lora` says; None where it says that there are none.

    >>> lora_of("r=16,targets=q_proj+v_proj")
    Lora(r=16, targets=('q_proj', 'v_proj'))
    """
    if text.strip() == NO_LORA:
        return None
    try:
        section = AdapterSection.model_validate(parse_lora(text))
    except ValidationError as error:
        faults = [fault.removeprefix("top level: ") for fault in explained(error)]
        raise InputError(f"--lora {shown(text)}: {'; '.join(faults)}") from None
    if section.use_dora:
        raise InputError(f"--lora {shown(text)}: what-if does not count the vectors that use_dora trains. Leave use_dora out")
    if section.r > MOST_WIDTH:
        raise InputError(f"--lora {shown(text)}: r must be at most {MOST_WIDTH}, got {section.r}")
    return Lora(r=section.r, targets=() if section.targets == ALL_LINEAR else tuple(section.targets))
