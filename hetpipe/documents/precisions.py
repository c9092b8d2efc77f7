"""In which precision each device type computes. `turns`: with which choices to plan, one after the other. `decide`: in what a
plan trains, from what is asked for, what the plan says, what was measured, and in what parameters are held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.number_types import Precision
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.formats import Name
from hetpipe.files.messages import Faults, InputError, nearest, shown

Chosen = dict[str, Precision]  # by device types
PrecisionChoice = Precision | Literal["auto"] | dict[Name, Precision]  # for all device types, or for each
Asked = Precision | Literal["auto"] | Mapping[str, Precision] | None


class HeldTypes(NamedTuple):
    """In which number types a model holds its parameters. `low`: those that do not train and have fewer bits than those that do;
    `full`: all others. `said`: whether a job says it, which is then what parameters are turned to."""

    full: frozenset[str] = frozenset(("float32",))
    low: frozenset[str] = frozenset()
    said: bool = False


def named(asked: Asked, cluster: Cluster) -> Chosen:
    """What is asked for by name, of each device type of the cluster of which anything is. InputError if a type is unknown."""
    kinds = dict.fromkeys(device.type for device in cluster.devices)
    if asked is None or asked == "auto":
        return {}
    if isinstance(asked, str):
        return dict.fromkeys(kinds, asked)
    strange = [kind for kind in asked if kind not in cluster.device_types]
    if strange:
        known = nearest(strange[0], list(cluster.device_types))
        raise InputError(f"precision: unknown device type {strange[0]!r}{known}")
    return {kind: asked[kind] for kind in kinds if kind in asked}


def turns(asked: Asked, profile: Profile, cluster: Cluster, *, others_auto: bool = False) -> list[Chosen]:
    """With which precisions to plan on this cluster, one choice after the other until a plan fits: as it is asked for; with
    "auto" (with `others_auto` also for types that a mapping does not name) first the fastest that is safe, then on one type more
    each time its other safe one, where that can take fewer bytes; first on the type that loses least time by it. (The first
    choice with which a plan fits need not be that of the fastest plan that fits, and a type may change that was not short.)"""
    chosen = named(asked, cluster)
    if asked == "auto" or (others_auto and isinstance(asked, Mapping)):
        measured = dict.fromkeys(m.device_type for m in profile.measurements)
        fastest = {kind: found for kind in measured if (found := _fastest(profile, kind)) is not None} | chosen
        free = [device.type for device in cluster.devices if device.type not in chosen and device.type in fastest]
        return in_turn(profile, fastest, list(dict.fromkeys(free)))
    return [chosen]


def in_turn(profile: Profile, fastest: Mapping[str, Precision], free: Collection[str]) -> list[Chosen]:
    """The fastest, then with one of the free types more each time at another precision (see `turns`)."""
    others = list[tuple[float, str, Precision]]()
    for kind in free:
        measured = _measured(profile, kind)
        own = next(m for m in measured if m.precision == fastest[kind])
        others += [
            (_seconds(m) / _seconds(own), kind, m.precision)
            for m in measured
            if m.precision is not None and _fewer_bytes(profile, m, own)
        ]
    found = [dict(fastest)]
    for _, kind, precision in sorted(others):
        found.append({**found[-1], kind: precision})
    return found


def in_job(asked: Asked, profile: Profile, cluster: Cluster) -> Asked:
    """What a job asks for: of a type that was measured at several precisions and is not named, fp32."""
    if asked == "auto":
        return asked
    full = {kind: precision for kind, precision in profile.in_full().items() if kind in cluster.device_types}
    return {**full, **named(asked, cluster)} or None


def decide(asked: Asked, plan: Plan, profile: Profile | None, cluster: Cluster, held: HeldTypes) -> Chosen | None:
    """In what the devices of a plan compute, by their types: what the plan says, else what is asked for, of what the profile has.
    Types without an entry compute as the model was built; None is no entry at all, and of "auto" what it is before anything was
    measured. InputError if two of these do not go together."""
    if plan.precision is not None:
        _check_asked(plan.precision, named(asked, cluster), plan, cluster)
        chosen = plan.precision
    elif profile is not None:
        chosen = turns(in_job(asked, profile, cluster), profile, cluster)[0]
    elif asked == "auto":
        return None
    else:
        chosen = named(asked, cluster)
    _check_held(chosen, plan, cluster, held)
    return chosen or None


def _check_asked(planned: Mapping[str, Precision], wanted: Mapping[str, Precision], plan: Plan, cluster: Cluster) -> None:
    """InputError if a plan was made for others than those that are asked for."""
    for kind in dict.fromkeys(cluster.device(device).type for device in plan.device_ids) if wanted else ():
        own, asked = planned.get(kind, "fp32"), wanted.get(kind, "fp32")
        if own != asked:
            raise InputError(
                f"the plan computes in {own} on {kind!r}, but precision says {asked}: leave precision out, or plan anew"
            )


def _check_held(chosen: Mapping[str, Precision], plan: Plan, cluster: Cluster, held: HeldTypes) -> None:
    """InputError if devices compute in a precision, and parameters are of another type than float32; or if some devices would
    compute in float32 with parameters that are held in fewer bits."""
    if chosen and (others := sorted(held.full - {"float32"})):
        told = ", ".join(f"{precision} on {kind!r}" for kind, precision in chosen.items())
        raise InputError(
            f"the plan computes in {told}, which is of matrix products of parameters in float32, but parameters are "
            f"{others[0]}: train them in float32, or plan without a precision"
        )
    full = [d for d in plan.device_ids if held.low and chosen.get(cluster.device(d).type, "fp32") == "fp32"]
    if full and (held.said or chosen):
        raise InputError(
            f"parameters that do not train are held in {sorted(held.low)[0]}, but device {full[0]} computes in float32, "
            "for which they would have to be float32: let all devices compute in bf16 or fp16 (train.precision, or precision= of "
            "hetpipe.wrap), or hold these parameters in float32 (train.frozen_dtype)"
        )


def without_full(profile: Profile) -> Profile:
    """The profile without fp32 of device types that have half precision: for models with parameters that are held in it."""
    able = {m.device_type for m in profile.measurements if m.precision not in (None, "fp32")}
    kept = tuple(m for m in profile.measurements if m.precision != "fp32" or m.device_type not in able)
    return profile.model_copy(update={"measurements": kept})


def known_precision(data: Any) -> Any:
    """Check the key `precision` of a section that has one, before anything else of it is read. Faults if a name is unknown."""
    given = data.get("precision") if isinstance(data, Mapping) else None
    each = given.values() if isinstance(given, Mapping) else [given] if given not in (None, "auto") else []
    known = "fp32, fp16 or bf16, for all or for each device type by its name, or auto"
    if faults := [f"precision is {known}, got {shown(x)}" for x in each if x not in get_args(Precision)]:
        raise Faults(faults)
    return data


def parse_precision(text: str | None) -> str | dict[str, str] | None:
    """`fp16` as it is, and `T4=fp16,A100=bf16` by device types.

    >>> parse_precision("T4=fp16,A100=bf16")
    {'T4': 'fp16', 'A100': 'bf16'}
    """
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    kinds = [kind.strip() for kind, _, _ in pairs]
    if len(set(kinds)) < len(kinds) or not all(kind and precision.strip() for kind, _, precision in pairs):
        raise InputError(f"--precision {shown(text)}: expected each device type once, as in 'T4=fp16,A100=bf16'")
    return {kind: precision.strip() for kind, (_, _, precision) in zip(kinds, pairs, strict=True)}


def safe(precisions: Collection[Precision | None]) -> list[Precision | None]:
    """Choose those of which "auto" takes the fastest: not fp16 where there is bf16, which is as fast, has the range of float32,
    and needs no scale of the loss (Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training).

    >>> safe(["fp32", "fp16", "bf16"]), safe(["fp32", "fp16"])
    (['fp32', 'bf16'], ['fp32', 'fp16'])
    """
    return [precision for precision in precisions if precision != "fp16" or "bf16" not in precisions]


def _measured(profile: Profile, device_type: str) -> list[Measurement]:
    """A type at each safe precision, of the least tensor-parallel degree that was measured; where it was at none that is said, at
    that."""
    said = [precision for precision in profile.precisions(device_type) if precision is not None]
    found = safe(said or [None])
    own = [m for m in profile.measurements if m.device_type == device_type and m.precision in found]
    least = min((m.tensor_parallel for m in own), default=1)
    return [m for m in own if m.tensor_parallel == least]


def _fastest(profile: Profile, device_type: str) -> Precision | None:
    """The safe precision that takes least time (see `_seconds`)."""
    best = min(_measured(profile, device_type), key=_seconds, default=None)
    return None if best is None else best.precision


def _seconds(m: Measurement) -> float:
    """Return the seconds of the whole model for a sample, forward and backward, at the micro-batch size that is best for it."""
    return float(min((m.forward + m.backward).sum(axis=1) / m.microbatch_sizes))


def _fewer_bytes(profile: Profile, m: Measurement, other: Measurement) -> bool:
    """Whether a precision takes fewer bytes than another where many samples are in flight, since each leaves less for backward,
    or where it is one micro-batch of the least size, since there are no copies of weights."""
    samples = m.microbatch_sizes[0]

    def saved(one: Measurement) -> int:
        return sum(one.saved_bytes_per_sample or [layer.saved_bytes_per_sample for layer in profile.layers])

    def least(one: Measurement) -> int:
        return sum(one.cast_bytes or ()) + samples * saved(one)

    return saved(m) < saved(other) or least(m) < least(other)
