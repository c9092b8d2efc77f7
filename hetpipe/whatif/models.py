"""Sizes of a model by its name: of those that were measured, of the zoo's transformers, of popular ones (popular.yaml), and of
Hugging Face's config.json."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hetpipe.files.formats import Document, Name, Strict
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.hf.hub import refuse_adapters
from hetpipe.hf.known import KINDS, SIZES
from hetpipe.hf.sizes import Config, Kind, TransformerSizes, cached_config, config_sizes, default_config, dense_kind, read_config
from hetpipe.whatif.shipped import shipped_layers


class NamedModel(NamedTuple):
    """A transformer of layers that are alike, and where its sizes come from. A head that shares its weights with the embedding is
    counted as one of its own, which it is as soon as both are on different devices."""

    name: str
    family: Kind
    sizes: TransformerSizes
    vocabulary: int
    source: str
    config: Config | None = None  # where its sizes are from one
    modules: tuple[str, ...] = ()  # of a layer, by their names, where these are known without transformers


class PopularModel(Strict):
    """What the published config.json of a model says of its sizes, where it was read, and the modules of a layer."""

    source: Name
    modules: tuple[Name, ...]
    config: dict[Name, Any]


class PopularModels(Document):
    """Models by name."""

    format: Literal["hetpipe.popular_models/1"]
    models: dict[Name, PopularModel]


@cache
def popular_models() -> PopularModels:
    """The models that come with hetpipe by name."""
    return PopularModels.load(Path(__file__).with_name("popular.yaml"))


def _zoo() -> dict[str, NamedModel]:
    """Radford et al. 2019, table 2, and Devlin et al. 2019, section 3; 12·h² + 13·h parameters a layer."""
    gpt2 = {name: (keys["n_layer"], keys["n_embd"]) for name, keys in SIZES["gpt2"].items()}
    found = {name: _plain(name, "gpt", *size, 50257, 1024 * size[1] + 2 * size[1]) for name, size in gpt2.items()}
    return {**found, "bert-base": _plain("bert-base", "bert", 12, 768, 30522, (512 + 2 + 2) * 768)}


def _plain(name: str, family: Kind, layers: int, hidden: int, vocabulary: int, rest: int) -> NamedModel:
    """`rest`: parameters beside layers and vocabulary."""
    words = vocabulary * hidden
    sizes = TransformerSizes(hidden, layers, 12 * hidden**2 + 13 * hidden, words + rest, words)
    return NamedModel(name, family, sizes, vocabulary, "the zoo of models")


def measured_model(name: str) -> NamedModel:
    """A model that was measured, by its name in the shipped file."""
    known = shipped_layers().models[name]
    return NamedModel(name, family_of(name), known.sizes, known.vocabulary, "measured")


def family_of(name: str) -> Kind:
    """The family of a measured model, by its name."""
    return "bert" if name.startswith("bert") else "llama" if name.startswith("llama") else "gpt"


def listed_models() -> list[str]:
    """The names of models that need no file."""
    others = (*_zoo(), *popular_models().models)
    return [*shipped_layers().models, *(name for name in others if name not in shipped_layers().models)]


def find_model(name: str) -> NamedModel:
    """A model by its name, by the path of a config.json or its folder, by its name on Hugging Face, where that is in the local
    cache, or by transformers' type (its default sizes). InputError with near names and all that are known."""
    if name in shipped_layers().models:
        return measured_model(name)
    if name in (zoo := _zoo()):
        return zoo[name]
    if (found := popular_models().models.get(name)) is not None:
        config = Config(Path(found.source), found.config["model_type"], found.config)
        return named_model(config, name, found.source)._replace(modules=found.modules)
    path = Path(name)
    try:
        if path.is_dir():
            refuse_adapters(path, name)
            return config_model(path / "config.json", name)
        if path.exists():
            return config_model(path, name)
    except OSError as error:
        raise InputError(f"cannot read {shown(name)}: {error.strerror}") from None
    if "/" in name and (cached := cached_config(name)) is not None:
        refuse_adapters(cached.parent, name)
        return config_model(cached, name)
    if "/" not in name and (defaults := default_config(name)) is not None:
        return named_model(defaults, name, str(defaults.path))
    more = "or the path of a Hugging Face config.json, a name on Hugging Face that is in the local cache, or a type (qwen3)"
    raise InputError(f"unknown model {shown(name)}{nearest(name, listed_models())}; {more}")


def config_model(path: Path, name: str) -> NamedModel:
    """The sizes that a config.json says. InputError for architectures that are not chains of layers alike."""
    config = read_config(path)
    return named_model(config, name, f"its config.json, model type {config.model_type}")


def named_model(config: Config, name: str, source: str) -> NamedModel:
    """The sizes of a configuration. InputError for architectures that are not chains of layers alike."""
    known = isinstance(config.model_type, str) and config.model_type in KINDS  # whatever stands there
    family = KINDS[config.model_type] if known else dense_kind(config)
    if family is None:
        raise InputError(
            f"{config.path}: models of type {shown(config.model_type)} are not known. Known: {', '.join(sorted(KINDS))}, and "
            "dense decoders of transformers whose configuration says how their projections can be split"
        )
    return NamedModel(name, family, *config_sizes(config, family), source, config)
