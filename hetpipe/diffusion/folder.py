"""A transformer of diffusers by its folder, by its name on Hugging Face, or by its type."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch import nn

from hetpipe.files.formats import read_mapping
from hetpipe.files.hub import cached_folder
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.layers.adapters.quantised import hush
from hetpipe.processes.environment import place

CONFIG = "config.json"
SCHEDULER = "scheduler/scheduler_config.json"
PART = "transformer"  # of a pipeline
FLOW = "flow"  # what a model predicts that is trained by flow matching
EXTRA = "diffusion transformers need diffusers: pip install 'hetpipe[diffusion,lora]'"


@dataclass(frozen=True)
class TransformerFolder:
    """Its `path`, its `config` (config.json), and the configuration of the `scheduler` beside it, if there is one. Without a path
    there is no folder: values are drawn."""

    path: Path | None
    config: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None

    @classmethod
    def of(cls, named: str | Path, part: str = PART) -> TransformerFolder:
        """Find a transformer. `named`: its own folder, or that of a pipeline, of which it is the `part`; or such a pipeline on
        Hugging Face, of which the transformer and the scheduler are downloaded. InputError where there is none."""
        wanted = [f"{part}/*.json", f"{part}/*.safetensors", "scheduler/*.json", CONFIG, "diffusion_pytorch_model*.safetensors"]
        root = cached_folder(named, wanted, quiet=place().local_rank > 0)[0]
        if not root.is_dir():
            raise InputError(f"there is no folder {shown(str(named))} (from {Path.cwd()}), and no model of that name")
        inner = (root / part / CONFIG).is_file()
        path = root / part if inner else root
        if not (path / CONFIG).is_file():
            raise InputError(
                f"{root} holds no {CONFIG}, and no {part}/{CONFIG}: name the folder of a transformer or of a pipeline"
            )
        config = read_mapping(path / CONFIG)
        if not isinstance(config, Mapping) or not isinstance(config.get("_class_name"), str):
            raise InputError(f"{path / CONFIG} has no _class_name, which diffusers writes: it is of another kind of model")
        scheduler = path.parent / SCHEDULER
        return cls(path, config, read_mapping(scheduler) if scheduler.is_file() else None)

    @classmethod
    def of_type(cls, name: str, config: Mapping[str, Any], prediction: str = FLOW) -> TransformerFolder:
        """A transformer of this type whose values are drawn. `config`: what differs from the type's own defaults. `prediction`:
        what it learns to predict; a schedule of noise is DDPM's own."""
        scheduler = None if prediction == FLOW else {"_class_name": "DDPMScheduler", "prediction_type": prediction}
        return cls(None, {"_class_name": name, **config}, scheduler)

    @property
    def said(self) -> str:
        """Where its configuration stands, for messages."""
        return str(self.path / CONFIG) if self.path is not None else f"type {self.type_name}"

    @property
    def type_name(self) -> str:
        """The type of the transformer."""
        return str(self.config["_class_name"])

    @cached_property
    def type(self) -> Any:
        """The class of diffusers of this name. InputError where it has no such transformer."""
        found = getattr(diffusers_of(), self.type_name, None)
        if not (inspect.isclass(found) and issubclass(found, nn.Module) and hasattr(found, "from_config")):
            raise InputError(f"{self.said} is of a {self.type_name}, which diffusers {diffusers_of().__version__} has not")
        return found

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments of its forward."""
        forward = inspect.signature(inspect.unwrap(self.type.forward))
        return [name for name in forward.parameters if name != "self"]

    def empty(self) -> nn.Module:
        """Build the transformer, with its parameters on the meta device. InputError where its configuration is none."""
        try:
            from accelerate import init_empty_weights
        except ImportError:
            raise InputError(EXTRA) from None
        with init_empty_weights():
            return self.made()

    def made(self) -> nn.Module:
        """Build the transformer, with values that are drawn. InputError where its configuration is none."""
        known = inspect.signature(self.type.__init__).parameters
        strange = [key for key in self.config if not key.startswith("_") and key not in known]
        if strange and self.path is None:  # diffusers leaves out what later releases write into a folder
            raise InputError(
                f"{strange[0]!r} is no key of the configuration of a {self.type_name}{nearest(strange[0], list(known))}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.type.from_config(dict(self.config))  # type: ignore[no-any-return]
        except Exception as error:  # whatever diffusers says of a configuration
            raise InputError(f"{self.said} is no configuration of a {self.type_name}: {error}") from error


@cache
def diffusers_of() -> Any:
    """The package. InputError where there is none."""
    hush()
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import diffusers
    except ImportError:
        raise InputError(EXTRA) from None
    return diffusers
