"""Linear layers whose matrix does not train and is held in few bits: in 4, as QLoRA does (NF4 with scales that are quantised,
too; Dettmers et al. 2023, section 3, by bitsandbytes), or in 8, with a scale for each row: whole numbers, or floating-point
numbers (E4M3; Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3).

The matrix is in numbers of the type that a layer computes in only while it is multiplied, forward and backward. What holds it are
buffers that are not saved, with shapes that are known before there are values, so that such a layer lies on the meta device, is
moved, counted and copied as any other.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hetpipe.documents.sections.adapter import FewBits
from hetpipe.files.messages import InputError

Lie = Literal["matrix", "rows", "flat"]
BLOCK, BLOCKS = 64, 256  # numbers with one scale, and scales with one scale of their own (Dettmers et al. 2023, section 3)


class QuantisedLinear(nn.Linear):
    """y = x·Wᵀ + b, of which W [out, in] is held as `PARTS` say, and b as it was. It has no parameter `weight`; the attribute of
    this name gives W anew each time, in float32."""

    PARTS: tuple[str, ...]
    LIE: ClassVar[Mapping[str, Lie]]  # how parts lie that are of some numbers only: as the matrix, by its rows, or row after row
    TOGETHER = 1  # so many numbers, one after the other in a row, are never parted

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        device = linear.weight.device
        for name, (shape, dtype) in self.shapes().items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device), persistent=False)
        if not linear.weight.is_meta:
            for name, value in self.quantise(linear.weight.detach()).items():
                self.get_buffer(name).copy_(value)

    @abstractmethod
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of each part."""

    @abstractmethod
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix [out, in], on its device."""

    @staticmethod
    @abstractmethod
    def dequantise(parts: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix of these parts, [out, in]."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W in float32, [out, in]."""
        return self.matrix(torch.float32)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """W in this type, [out, in]."""
        return self.dequantise(self._parts(), (self.out_features, self.in_features), dtype)

    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers[name] for name in self.PARTS)  # type: ignore[misc]

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] to […, out]."""
        output = self.product(input)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def product(self, input: Tensor) -> Tensor:
        """Return x·Wᵀ, […, in] to […, out]."""
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        shape = (self.out_features, self.in_features)
        output: Tensor = _Product.apply(input, self.dequantise, shape, dtype, *self._parts())  # type: ignore[no-untyped-call]
        return output

    def buffer_type(self, name: str, held: torch.dtype) -> torch.dtype:
        """Its parts are of the types that they are of, whatever parameters are held in."""
        return self.get_buffer(name).dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class _Product(torch.autograd.Function):
    """x·Wᵀ, and gᵀ·W for x alone: W is made of its parts for each, and not kept between."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dequantise: Callable[..., Tensor], shape: tuple[int, int], dtype: torch.dtype, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.dequantise, ctx.shape, ctx.dtype, ctx.given = dequantise, shape, dtype, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.to(dtype), dequantise(parts, shape, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            found = gradient.to(ctx.dtype) @ ctx.dequantise(parts, ctx.shape, ctx.dtype)
        return (found.to(ctx.given), *[None] * (3 + len(parts)))


class _ByRows(QuantisedLinear):
    """In 8 bits: a number of type `CODES`, of which the greatest is `MOST`, times a scale for each row."""

    PARTS = ("codes", "scales")
    LIE: ClassVar[Mapping[str, Lie]] = {"codes": "matrix", "scales": "rows"}
    CODES: ClassVar[torch.dtype]
    MOST: ClassVar[float]

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of each part."""
        return {"codes": ((self.out_features, self.in_features), self.CODES), "scales": ((self.out_features, 1), torch.float32)}

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix [out, in]."""
        numbers = _finite(weight)
        scales = numbers.abs().amax(1, keepdim=True) / self.MOST
        scales[scales == 0] = 1.0
        return {"codes": self.nearest(numbers / scales).to(self.CODES), "scales": scales}

    @staticmethod
    def nearest(numbers: Tensor) -> Tensor:
        """What of them a code can be made of without further rounding down."""
        return numbers

    @staticmethod
    def dequantise(parts: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix of these parts, [out, in]."""
        codes, scales = parts
        return (codes.float() * scales).to(dtype)


class Int8Linear(_ByRows):
    """Whole numbers from -127 to 127."""

    CODES, MOST = torch.int8, 127.0

    @staticmethod
    def nearest(numbers: Tensor) -> Tensor:
        """Whole ones."""
        return numbers.round()


class Fp8Linear(_ByRows):
    """Floating-point numbers of 4 bits of exponent and 3 of mantissa (E4M3), up to 448: the step between two is about 1/8 of a
    number, so small numbers of a row keep more of theirs than in whole numbers, and large ones less."""

    CODES, MOST = torch.float8_e4m3fn, 448.0


class Nf4Linear(QuantisedLinear):
    """In 4 bits: each number is one of 16, times the scale of its block of 64. A scale is one of the 256 `steps` (Dettmers et
    al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.2) times that of 256 scales, beside the mean of all."""

    PARTS = ("codes", "scales", "scales_of_scales", "mean_scale", "steps")
    LIE: ClassVar[Mapping[str, Lie]] = {"codes": "flat", "scales": "flat"}
    TOGETHER = BLOCK

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of each part."""
        numbers = self.out_features * self.in_features
        blocks = ceil(numbers / BLOCK)
        return {
            "codes": ((ceil(numbers / 2), 1), torch.uint8),
            "scales": ((blocks,), torch.uint8),
            "scales_of_scales": ((ceil(blocks / BLOCKS),), torch.float32),
            "mean_scale": ((), torch.float32),
            "steps": ((BLOCKS,), torch.float32),
        }

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix [out, in]."""
        from bitsandbytes import functional as few

        codes, state = few.quantize_4bit(_finite(weight).contiguous(), blocksize=BLOCK, quant_type="nf4")
        mean = state.absmax.double().mean().float()  # in float64, so that the order of the sum changes no bit
        scales, above = few.quantize_blockwise(state.absmax - mean, blocksize=BLOCKS)
        return {"codes": codes, "scales": scales, "scales_of_scales": above.absmax, "mean_scale": mean, "steps": above.code}

    @staticmethod
    def dequantise(parts: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix of these parts, [out, in]."""
        codes, scales, above, mean, steps = parts
        own: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(scales, above, steps, BLOCKS, torch.float32)
        return Nf4Linear.numbers(codes, own + mean, shape, dtype)

    @staticmethod
    def numbers(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix of these codes, [out, in], whose blocks have these scales in float32."""
        known = torch.float32 if dtype == torch.float64 else dtype
        found: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", shape, known)
        return found.to(dtype)


def _finite(weight: Tensor) -> Tensor:
    """In float32. InputError where a number is infinite or none: all that share a scale with it would be lost."""
    numbers = weight.float()
    if not bool(torch.isfinite(numbers).all()):
        raise InputError(
            f"a matrix of shape {list(weight.shape)} holds infinite numbers, or such as are no numbers, and cannot "
            "be held in few bits: write base: as-is"
        )
    return numbers


LINEAR: dict[FewBits, type[QuantisedLinear]] = {"nf4": Nf4Linear, "fp8": Fp8Linear, "int8": Int8Linear}


def load_bits(bits: FewBits) -> None:
    """InputError where the library that packs such numbers is missing."""
    if bits != "nf4":
        return
    hush()
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise InputError("base: nf4 needs bitsandbytes: pip install 'hetpipe[lora]', or write base: fp8 or int8") from None


def hush() -> None:
    """Let bitsandbytes, which others import, too, not ask for a package that fetches compiled code."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
