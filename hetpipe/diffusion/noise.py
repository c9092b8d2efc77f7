"""With what a sample is mixed, what the model is told of it, and what it is to predict.

Flow matching (Lipman et al. 2023; Liu et al. 2023) mixes latents and noise by σ from 0 to 1, and the model predicts the way from
one to the other. How σ is drawn, and how it is weighed: Esser et al. 2024 (Stable Diffusion 3), section 3.1. Models of DDPM (Ho
et al. 2020) predict the noise, or v, at one of a schedule's steps; weighed by min-SNR (Hang et al. 2023, section 3.4), or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hetpipe.diffusion.folder import FLOW, SCHEDULER, TransformerFolder, diffusers_of
from hetpipe.diffusion.kinds import Kind, Prediction
from hetpipe.files.messages import InputError, nearest

Times = Literal["uniform", "logit_normal"]
Weighting = Literal["none", "sigma_sqrt", "cosmap", "min_snr"]
ALL = (0.0, 1.0)
GAMMA = 5.0  # of min-SNR: the most that a signal may be stronger than the noise to count as much


class Drawn(NamedTuple):
    """A sample with noise, what the model is told of time, what it is to predict, and how much that counts."""

    mixed: Tensor
    time: Tensor
    wanted: Tensor
    weight: Tensor


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How samples are mixed with noise, for one kind of model.

    Attributes:
        times: how σ is drawn: uniform, or by a sigmoid of a normal distribution with this `mean` and `deviation`; then it is
            shifted: s σ / (1 + (s - 1) σ).
        sigmas: from which to which it is then, whatever else would be drawn.
        scale: what the model is told where σ is 1.
        signal: of a schedule of DDPM: α̅ of each step, float32 [steps]; None: flow matching.
    """

    kind: Kind
    prediction: Prediction
    times: Times
    weighting: Weighting
    mean: float
    deviation: float
    sigmas: tuple[float, float]
    shift: float
    scale: float
    signal: Tensor | None

    @classmethod
    def of(
        cls,
        folder: TransformerFolder,
        kind: Kind,
        *,
        times: str = "logit_normal",
        weighting: str = "none",
        mean: float = 0.0,
        deviation: float = 1.0,
        sigmas: Sequence[float] = ALL,
        shift: float | None = None,
    ) -> Noise:
        """For a transformer, whose scheduler says what it predicts, and by how much σ is shifted unless that is given. InputError
        for what does not go together."""
        for what, value, known in (("times", times, get_args(Times)), ("weighting", weighting, get_args(Weighting))):
            if value not in known:
                raise InputError(f"unknown {what} {value!r}{nearest(str(value), known)}")
        if deviation <= 0 or (shift is not None and shift <= 0):
            raise InputError(f"deviation is {deviation} and shift {shift}, and both must be above 0")
        if len(sigmas) != 2 or not 0 <= sigmas[0] < sigmas[1] <= 1:
            raise InputError(f"sigmas is {list(sigmas)}, and must be two numbers from 0 to 1, the smaller first")
        prediction = _prediction(folder.scheduler, kind)
        flow = prediction == FLOW
        if (weighting in ("sigma_sqrt", "cosmap") and not flow) or (weighting == "min_snr" and flow):
            fits = "none, sigma_sqrt or cosmap" if flow else "none or min_snr"
            raise InputError(f"weighting {weighting!r} is not for a model that predicts {prediction}: take {fits}")
        if not flow and (times, mean, deviation, tuple(sigmas), shift) != ("logit_normal", 0.0, 1.0, ALL, None):
            raise InputError(f"times, mean, deviation, sigmas and shift are of flow matching; this model predicts {prediction}")
        said = folder.scheduler or {}
        if shift is None and flow and not said.get("use_dynamic_shifting"):
            shift = next((float(said[key]) for key in ("shift", "flow_shift") if said.get(key) is not None), None)
        factor = float(folder.config.get(kind.time_key, 1.0)) if kind.time_key is not None else 1.0
        return cls(
            kind=kind,
            prediction=prediction,
            times=times,  # type: ignore[arg-type]
            weighting=weighting,  # type: ignore[arg-type]
            mean=mean,
            deviation=deviation,
            sigmas=(sigmas[0], sigmas[1]),
            shift=shift or 1.0,
            scale=kind.time * factor,
            signal=None if flow else _signal(folder),
        )

    def draw(self, latents: Tensor) -> Drawn:
        """Noise and a time for one sample, by torch's generator."""
        noise = torch.randn(latents.shape)
        return self._flow(latents, noise) if self.signal is None else self._step(latents, noise, self.signal)

    def _flow(self, latents: Tensor, noise: Tensor) -> Drawn:
        sigma = self._sigma()
        weight = torch.ones(())
        if self.weighting == "sigma_sqrt":
            weight = sigma**-2
        elif self.weighting == "cosmap":
            weight = 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
        wanted = latents - noise if self.kind.negated else noise - latents
        time = (1 - sigma if self.kind.inverted else sigma) * self.scale
        return Drawn(torch.lerp(latents, noise, sigma), time, wanted, weight)

    def _sigma(self) -> Tensor:
        """Draw σ: the inverse of its distribution function, at a number drawn between the function's values at both ends."""
        ends = torch.tensor(self.sigmas, dtype=torch.float64)
        ends = ends / (self.shift - (self.shift - 1) * ends)
        if self.times == "logit_normal":
            ends = torch.special.ndtr((ends.logit() - self.mean) / self.deviation)
        drawn = torch.lerp(ends[0], ends[1], torch.rand((), dtype=torch.float64))
        if self.times == "logit_normal":
            drawn = torch.sigmoid(torch.special.ndtri(drawn) * self.deviation + self.mean)
        return (self.shift * drawn / (1 + (self.shift - 1) * drawn)).float()

    def _step(self, latents: Tensor, noise: Tensor, signal: Tensor) -> Drawn:
        step = torch.randint(len(signal), ())
        share = signal[step]
        mixed = share.sqrt() * latents + (1 - share).sqrt() * noise
        velocity = self.prediction == "v_prediction"
        wanted = share.sqrt() * noise - (1 - share).sqrt() * latents if velocity else noise
        weight = torch.ones(())
        if self.weighting == "min_snr":
            ratio = share / (1 - share)
            weight = ratio.clamp(max=GAMMA) / (ratio + 1) if velocity else (GAMMA / ratio).clamp(max=1)
        return Drawn(mixed, step, -wanted if self.kind.negated else wanted, weight)


def _prediction(scheduler: Mapping[str, Any] | None, kind: Kind) -> Prediction:
    """Return what the scheduler says that a model predicts, or else what its kind says."""
    if scheduler is None:
        return kind.prediction
    said, name = scheduler.get("prediction_type"), str(scheduler.get("_class_name", ""))
    if name.startswith("FlowMatch") or said == "flow_prediction" or scheduler.get("use_flow_sigmas"):
        return "flow"
    if said in ("epsilon", "v_prediction"):
        return said  # type: ignore[no-any-return]
    if said is None:
        return kind.prediction
    raise InputError(f"the scheduler says prediction_type {said!r}; known are epsilon, v_prediction and flow_prediction")


def _signal(folder: TransformerFolder) -> Tensor:
    """α̅ of each step of the schedule beside a transformer, as diffusers computes it."""
    if folder.scheduler is None:
        raise InputError(
            f"a {folder.type_name} is trained by a schedule of noise, and beside {folder.path} is no {SCHEDULER}: name the "
            "folder of the whole pipeline"
        )
    name = str(folder.scheduler.get("_class_name"))
    scheduler = getattr(diffusers_of(), name, None)
    if scheduler is None or not hasattr(scheduler, "from_config"):
        raise InputError(f"{SCHEDULER} is of a {name}, which diffusers {diffusers_of().__version__} has not")
    signal = getattr(scheduler.from_config(dict(folder.scheduler)), "alphas_cumprod", None)
    if not isinstance(signal, Tensor):
        raise InputError(f"a {name} has no schedule of noise (alphas_cumprod)")
    return signal.float()
