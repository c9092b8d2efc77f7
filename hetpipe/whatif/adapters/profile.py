"""The profile of a model of equal layers, as it is with adapters over a base that does not train.

A product of a matrix that does not train has no product for its gradient: backward takes as long as forward, but for
attention's own products, which have two. The embedding, before all adapters, saves nothing and has no backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from hetpipe.documents.clusters.assumed import CONTEXT_BYTES, CUBLAS_BYTES
from hetpipe.documents.number_types import BYTES, TYPE_OF, Frozen, Precision
from hetpipe.documents.profile import LayerProfile, Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.files.messages import InputError, shown
from hetpipe.hf.sizes import Matrix, Widths, config_matrices, config_type, cut_layer, layer_modules, layer_widths
from hetpipe.whatif.adapters.base import Base, held_bytes, made_bytes, matrix_bytes
from hetpipe.whatif.adapters.lora import Lora
from hetpipe.whatif.adapters.trained import ADAPTER_BYTES, extra, saved_bytes
from hetpipe.whatif.cards import Card
from hetpipe.whatif.models import NamedModel

Times = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A model with adapters over its base, whose layers have these widths and modules, `others` parameters beside their matrices,
    and which was built in this type."""

    model: NamedModel
    lora: Lora
    base: Base
    built: Frozen
    widths: Widths
    modules: Collection[str]
    matrices: tuple[Matrix, ...]
    targets: tuple[Matrix, ...]
    others: int
    shared: bool  # whether the head is the embedding's matrix

    @classmethod
    def of(cls, model: NamedModel | Profile, lora: Lora, base: Base) -> Adapted:
        """InputError where the matrices of the model's layers are not known, or it has not those that are asked for."""
        config = model.config if isinstance(model, NamedModel) else None
        if not isinstance(model, NamedModel) or config is None or model.family != "llama":
            name = model.model if isinstance(model, Profile) else model.name
            raise InputError(
                f"--lora needs the matrices of the layers, and those of {shown(name)} are not known. They are known for "
                "models with a "
                "config.json whose layers have a gate (Llama, Mistral, Qwen and the like), such as qwen3-8b"
            )
        modules = model.modules or layer_modules(config.model_type)
        matrices = config_matrices(config, modules)
        return cls(
            model=model,
            lora=lora,
            base=base,
            built=config_type(config),
            widths=layer_widths(config),
            modules=modules,
            matrices=matrices,
            targets=lora.chosen(matrices, model.name),
            others=model.sizes.layer_parameters - sum(matrix.parameters for matrix in matrices),
            shared=config.values.get("tie_word_embeddings") is True,
        )

    @property
    def trained(self) -> int:
        """Numbers of a layer that train."""
        return sum(map(self.lora.parameters, self.targets))

    def bytes_of_base(self, precision: Precision) -> tuple[int, ...]:
        """Bytes of the base in embedding, layers and head, on a device that computes at this precision."""
        sizes, number = self.model.sizes, held_bytes(self.base, self.built, precision)
        layer = number * self.others + sum(matrix_bytes(m, self.base, self.built, precision) for m in self.matrices)
        return (number * sizes.embedding_parameters, *[layer] * sizes.layers, number * sizes.head_parameters)

    def shard(self, degree: int) -> Adapted:
        """The model as one of so many devices has it over which layers are split, with the adapters' parts: beside a matrix that
        is cut by outputs A is whole, beside one that is cut by inputs B is (`hetpipe.layers.shards.styles`)."""
        cut = cut_layer(self.widths, self.matrices, degree)
        assert cut is not None
        widths, matrices = cut
        names = {target.name for target in self.targets}
        return replace(self, widths=widths, matrices=matrices, targets=tuple(m for m in matrices if m.name in names))

    def shard_measurement(self, plain: Measurement, tokens: int, card: Card) -> Measurement:
        """Return the measurement of a shard as `shard` makes it; `plain` is that of one whose layers all train."""
        trained = self._trained_bytes
        held = tuple(base + own for base, own in zip(self.bytes_of_base("bf16"), trained, strict=True))
        return self._measurement(plain, tokens, card).model_copy(update={"parameter_bytes": held, "trained_bytes": trained})

    @property
    def _trained_bytes(self) -> tuple[int, ...]:
        return (0, *[ADAPTER_BYTES * self.trained] * self.model.sizes.layers, 0)

    def stream_number(self, precision: Precision) -> int:
        """Bytes of a number that goes from layer to layer."""
        return held_bytes(self.base, self.built, precision)

    def profile(self, plain: Profile, tokens: int, cards: Mapping[str, Card]) -> Profile:
        """The model's profile, that of training all of it being `plain`: of samples of so many tokens, on these cards."""
        least = self.bytes_of_base("bf16")
        tied = least[-1] if self.shared else 0
        layers = tuple(
            LayerProfile(
                name=layer.name,
                parameter_bytes=held + own,
                trained_bytes=own,
                saved_bytes_per_sample=saved,
                output_bytes_per_sample=layer.output_bytes_per_sample,
                tied="embedding" if tied and not own else None,
                tied_parameter_bytes=tied if not own else 0,
            )
            for layer, held, own, saved in zip(plain.layers, least, self._trained_bytes, self._saved(tokens, "fp32"), strict=True)
        )
        measurements = tuple(self._measurement(m, tokens, cards[m.device_type]) for m in plain.measurements)
        return plain.model_copy(update={"layers": layers, "measurements": measurements})

    def _saved(self, tokens: int, precision: Precision) -> tuple[int, ...]:
        """Embedding, layers, and head: the input of its norm, and logits and probabilities, as where all of it trains."""
        layer = saved_bytes(self.widths, self.modules, self.lora, self.targets, tokens, precision)
        head = tokens * (4 * self.widths.hidden + 2 * BYTES[TYPE_OF[precision]] * self.model.vocabulary)
        return (0, *[layer] * self.model.sizes.layers, head)

    def _measurement(self, plain: Measurement, tokens: int, card: Card) -> Measurement:
        """Of one card at one precision. What the base takes there more than in half precision stands with the copies that a
        lower precision keeps of what is held in float32: a profile has bytes of parameters for all cards alike."""
        precision = cast("Precision", plain.precision)
        more = extra(self.lora, self.targets, self.matrices, self.base, tokens, precision, card)
        hidden, number = self.widths.hidden, self.stream_number(precision)
        again = 2 * tokens * hidden / (self.model.sizes.layer_parameters + 2 * tokens * hidden)  # attention's part of all FLOPs
        forward, backward = list[Times](), list[Times]()
        for size, f, b in zip(plain.microbatch_sizes, plain.forward_seconds, plain.backward_seconds, strict=True):
            own, made = size * more.sample_seconds, more.microbatch_seconds
            forward.append((0.0, *(t + own + made for t in f[1:-1]), f[-1]))
            pairs = zip(f[1:-1], b[1:-1], strict=True)
            backward.append((0.0, *(min(t * (1 + again), u) + 2 * own + made for t, u in pairs), min(f[-1], b[-1])))
        wider = zip(self.bytes_of_base(precision), self.bytes_of_base("bf16"), strict=True)
        outputs = (*[number * tokens * hidden] * (self.model.sizes.layers + 1), 4)
        own_bytes = {
            "saved_bytes_per_sample": self._saved(tokens, precision),
            "output_bytes_per_sample": outputs,
            "cast_bytes": tuple(a - b + c for (a, b), c in zip(wider, self._copies(precision), strict=True)),
        }
        times = {"forward_seconds": tuple(forward), "backward_seconds": tuple(backward)}
        return plain.model_copy(update={**times, **own_bytes})

    def copied(self, precision: Precision) -> bool:
        """Whether the base is held in float32 where matrix products are computed in half precision."""
        return precision != "fp32" and held_bytes(self.base, self.built, precision) == BYTES["float32"]

    def _copies(self, precision: Precision) -> Sequence[int]:
        """Bytes of the copies in half precision that autocast keeps: of adapters, and of a base in float32."""
        sizes, number = self.model.sizes, BYTES[TYPE_OF[precision]]
        if precision == "fp32":
            return (0,) * (sizes.layers + 2)
        wide = self.copied(precision)
        matrices = sum(matrix.parameters for matrix in self.matrices) if wide else 0
        return (0, *[number * (self.trained + matrices)] * sizes.layers, number * sizes.head_parameters if wide else 0)

    def with_made(self, profile: Profile) -> Profile:
        """The profile with the largest matrix that a card makes of a quantised one, beside what the framework is assumed to take
        of it; of each card in the widest type in which the profile has it."""

        def most(kind: str) -> int:
            precisions = [p for p in profile.precisions(kind) if p is not None]
            return max(made_bytes(m, self.base, p) for m in self.matrices for p in precisions)

        kinds = dict.fromkeys(m.device_type for m in profile.measurements)
        overheads = tuple(
            DeviceOverhead(device_type=kind, device_bytes=CONTEXT_BYTES + CUBLAS_BYTES + size)
            for kind in kinds
            if (size := most(kind))
        )
        return profile.model_copy(update={"overheads": overheads})
