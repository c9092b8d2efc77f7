"""Bytes of a base that does not train, as it is held beside its adapters.

- as-is: in the number type that its config.json names; bf16: in bfloat16. A device that computes in half precision holds that;
  one that computes in float32 holds float32 (`NumberTypes.holds`).
- nf4: four bits a number in blocks of 64, each with a scale of one byte, which have scales of float32 in blocks of 256
  (Dettmers et al. 2023, "QLoRA", section 3: double quantisation; the blocks are bitsandbytes' defaults).
- int8 and fp8: a byte a number, and a scale of float32 for each row, which gives one output (Dettmers et al. 2022, "LLM.int8()",
  section 2.1).

nf4, fp8 and int8 hold the linear matrices of layers so; embedding, head and norms are held as with bf16. Before each product,
forward and backward, a matrix is made of what is held, in what the device computes in, and is gone after it."""

from __future__ import annotations

from typing import Literal, get_args

from hetpipe.documents.number_types import BYTES, TYPE_OF, Frozen, NumberTypes, Precision
from hetpipe.documents.sections.adapter import FewBits
from hetpipe.hf.sizes import Matrix

Base = Literal["as-is", "bf16", FewBits]
QUANTISED = get_args(FewBits)
NF4_BLOCK, NF4_SCALES = 64, 256  # numbers of a block; scales of a block of scales
SCALE_BYTES = 4  # of float32


def held_bytes(base: Base, built: Frozen, precision: Precision) -> int:
    """Bytes of a number that is not quantised, on a device that computes at this precision."""
    kept = built if base == "as-is" else "bfloat16"
    return BYTES[NumberTypes.of("float32", precision).holds(kept, trained=False)]


def matrix_bytes(matrix: Matrix, base: Base, built: Frozen, precision: Precision) -> int:
    """Bytes of a linear matrix of a layer, with its scales."""
    n = matrix.parameters
    if base == "nf4":
        scales = -(-n // NF4_BLOCK)
        return -(-n // 2) + scales + SCALE_BYTES * -(-scales // NF4_SCALES)
    if base in ("fp8", "int8"):
        return n + SCALE_BYTES * matrix.outputs
    return n * held_bytes(base, built, precision)


def made_bytes(matrix: Matrix, base: Base, precision: Precision) -> int:
    """Bytes of a matrix as it is made of a quantised one for a product; 0 where none is made."""
    return matrix.parameters * BYTES[TYPE_OF[precision]] if base in QUANTISED else 0
