"""Number types: in which a device holds a model's parameters and computes, and what follows from that for its neighbours."""

from __future__ import annotations

from typing import Literal, NamedTuple

NumberType = Literal["float64", "float32", "bfloat16", "float16"]  # as torch calls them
Held = Literal["float32", "float64", "bfloat16"]  # of which a whole model can be
Frozen = Literal["float32", "bfloat16", "float16"]  # in which parameters can be held that do not train
Precision = Literal["fp32", "fp16", "bf16"]  # of matrix products, as files and commands call it; parameters are of float32
BYTES: dict[NumberType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TYPE_OF: dict[Precision, NumberType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
INITIAL_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # of a loss in float16, and steps: torch.amp.GradScaler's
PRECISION_OF: dict[NumberType, Precision] = {number_type: precision for precision, number_type in TYPE_OF.items()}


class NumberTypes(NamedTuple):
    """In which types a device trains its layers: the parameters that it holds, and what it computes in (torch's autocast, where
    that is another). None is whatever the model was built in, which is the same on all devices. Where a device casts, parameters
    that do not train may be held in fewer bits (see `holds`)."""

    held: NumberType | None = None
    computed: NumberType | None = None

    @classmethod
    def of(cls, held: NumberType, precision: Precision | None = None) -> NumberTypes:
        """Parameters of this type, and matrix products of this precision: without one, or with that of float32, as held."""
        return cls(held, held if precision in (None, "fp32") else TYPE_OF[precision])

    @classmethod
    def at(cls, precision: Precision | None) -> NumberTypes:
        """Of a measurement at this precision; without one, as the model was built."""
        return AS_BUILT if precision is None else cls.of("float32", precision)

    @property
    def casts(self) -> bool:
        """Whether what is computed is of another type than the parameters."""
        return self.computed not in (None, self.held)

    def holds(self, built: NumberType, *, trained: bool) -> NumberType:
        """In which type a parameter is held that was built in this one: what does not train and has fewer bits stays as it is on
        a device that casts.

        >>> NumberTypes.of("float32", "bf16").holds("float16", trained=False)
        'float16'
        >>> NumberTypes.of("float32").holds("float16", trained=False)
        'float32'
        """
        if self.held is None or (self.casts and not trained and BYTES[built] < BYTES[self.held]):
            return built
        return self.held

    @property
    def entered(self) -> NumberType | None:
        """To what numbers that come from a device with other types are turned. None: a device that casts takes any."""
        return None if self.casts else self.held

    @property
    def summed(self) -> NumberType | None:
        """In which type gradients are summed over replicas, which is the same for all that hold a layer."""
        return self.held

    @property
    def loss_is_scaled(self) -> bool:
        """Whether gradients may vanish in what is computed, so that the loss has to be scaled (Micikevicius et al. 2018,
        Mixed Precision Training, section 3.2)."""
        return self.computed == "float16"

    def sent(self, leaving: NumberType, receiver: NumberTypes) -> NumberType:
        """In which type a number that leaves a layer here goes to the next stage, and its gradient comes back: as it is, or as
        the receiver's parameters are where these have fewer bits.

        >>> NumberTypes("float64").sent("float64", NumberTypes("float32"))
        'float32'
        >>> NumberTypes("float32").sent("float32", NumberTypes("float64"))
        'float32'
        """
        if receiver == self or receiver.held is None or BYTES[receiver.held] >= BYTES[leaving]:
            return leaving
        return receiver.held


AS_BUILT = NumberTypes()
