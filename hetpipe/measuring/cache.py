"""Profiles that were measured before: kept by all that they depend on, and trusted only while a short look confirms them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetpipe
from hetpipe.building.build import optimizer_factory
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.precisions import PrecisionChoice
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Model, named_layers, row_shapes
from hetpipe.layers.shards.styles import styles_of
from hetpipe.layers.transforms import lineage_of
from hetpipe.measuring.confirm import confirmed_links, unconfirmed_types
from hetpipe.measuring.links import ranks_of_nodes
from hetpipe.measuring.measure import measurers, profile_cluster
from hetpipe.processes.arithmetic import arithmetic, other_flags
from hetpipe.processes.peers.others import showing_others
from hetpipe.processes.progress import Activity, say, warn
from hetpipe.processes.world import World


def measured(
    model: Model,
    cluster: Cluster,
    world: World,
    options: ProfileSection,
    optimizer: TorchNamed,
    *,
    precision: PrecisionChoice | None = None,
    fresh: bool = False,
    whole_nodes: bool = False,
) -> Profile:
    """The cached profile of this model on these devices, or on these and others, if they are still as fast; else a new
    measurement, which is cached. `precision`: in what each type is measured. `whole_nodes`: a process may use all devices of its
    node. Collective."""
    path = cache_path(model, cluster, options, repr(optimizer), world.hosts, precision)
    nodes = nodes_of(cluster, world)
    cached = world.first((_cached(path) or _of_more(path, nodes)) if world.is_main and not fresh else None)
    if cached is not None:
        found = _confirmed(Profile.parse(cached, path), model, cluster, world, whole_nodes)
        if found is not None:
            if world.is_main and found != Profile.parse(cached, path):
                found.save(path)
            return found
    profile = profile_cluster(
        model, cluster, world, options, optimizer_factory(optimizer), precision=precision, whole_nodes=whole_nodes
    )
    profile = profile.model_copy(update={"provenance": {**profile.provenance, "nodes": nodes}})
    if world.is_main:
        profile.save(path)
    world.barrier()
    return profile


def home_of(
    profile: Profile,
    model: Model,
    cluster: Cluster,
    world: World,
    options: ProfileSection,
    optimizer: TorchNamed,
    precision: PrecisionChoice | None = None,
) -> str | None:
    """Where the cache keeps this profile; None if it does not."""
    path = cache_path(model, cluster, options, repr(optimizer), world.hosts, precision)
    found = _cached(path)
    return path if found is not None and Profile.parse(found, path) == profile else None


def note_arithmetic(profile: Profile, world: World, source: str) -> None:
    """Warn on one rank of a profile file that was measured on cards with other flags of torch than there are now."""
    noted = profile.provenance.get("arithmetic")
    if not (world.is_main and torch.cuda.is_available() and isinstance(noted, Mapping)):
        return
    if others := other_flags(noted, arithmetic()):
        warn(
            f"warning: {source} was measured with other arithmetic: {others}; its seconds may be others, too: set the flags as "
            "they were, or measure again with 'hetpipe profile'"
        )


def _confirmed(profile: Profile, model: Model, cluster: Cluster, world: World, whole_nodes: bool) -> Profile | None:
    """The profile, with new links where those are not as fast as they were; None where a device is not. Collective."""
    title = "comparing the cached profile with the devices"
    with Activity(title, shown=world.is_main) as activity, showing_others(activity):
        who = measurers(cluster, world.rank_of, whole_nodes=whole_nodes)
        others = unconfirmed_types(profile, model, cluster, world, who)
    if others:
        if world.is_main:
            say(f"the cached profile no longer holds, measuring again: {'; '.join(others)}")
        return None
    wires, others = confirmed_links(profile, cluster, world)
    if others and world.is_main:
        say(f"the cached profile's links no longer hold, and were measured again: {'; '.join(others)}")
    if wires is None:
        return profile
    noted = {**profile.provenance, "links": wires.noted()}
    return profile.model_copy(update={"links": wires.links, "adapters": wires.adapters, "provenance": noted})


def _cached(path: str) -> Any:
    """The profile in the cache; None where there is none, or one that is no longer readable."""
    try:
        return Profile.load(path).model_dump(mode="json") if Path(path).exists() else None
    except InputError:
        return None


def nodes_of(cluster: Cluster, world: World) -> dict[str, dict[str, Any]]:
    """Each node's devices, by type, and the hosts of its ranks: where a profile was measured, as its provenance has it."""
    ranks = ranks_of_nodes(cluster, world)
    return {
        node.name: {"devices": dict(node.devices), "hosts": sorted({world.hosts[rank] for rank in ranks.get(node.name, ())})}
        for node in cluster.nodes
    }


def _of_more(path: str, nodes: Mapping[str, Mapping[str, Any]]) -> Any:
    """The newest profile in the cache of the same model on these nodes, of the same hosts, and more of them, or more devices on
    them; None where there is none."""
    alike = Path(path).parent.glob(f"{Path(path).stem.rpartition('-')[0]}-*.json")
    for other in sorted(alike, key=lambda file: file.stat().st_mtime, reverse=True):
        found = _cached(str(other))
        there = found["provenance"].get("nodes", {}) if found is not None else {}
        if all(_covers(there.get(name), node) for name, node in nodes.items()):
            return found
    return None


def _covers(there: Any, node: Mapping[str, Any]) -> bool:
    """Whether a node that was measured is this one, with as many devices of each type at least."""
    if not isinstance(there, Mapping) or there.get("hosts") != node["hosts"]:
        return False
    return all(there.get("devices", {}).get(kind, 0) >= count for kind, count in node["devices"].items())


def cache_path(
    model: Model,
    cluster: Cluster,
    options: ProfileSection,
    optimizer: str,
    hosts: tuple[str, ...] = (),
    precision: PrecisionChoice | None = None,
) -> str:
    """Where the profile of this model and its loss, at these precisions, on these device types of these hosts, with these
    versions and flags of torch, is kept."""
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.layers.named_parameters()]
    sample: list[Any] = [
        (tuple(t.shape[1:]), str(t.dtype)) for t in (model.inputs if isinstance(model.inputs, tuple) else (model.inputs,))
    ] + [(row_shapes(batch.inputs), row_shapes(batch.targets), batch.share) for batch in model.shorter]
    content: list[Any] = [
        model.name,
        repr(model.layers),
        _settings(model),
        [found.identities for layer in model.layers if (found := lineage_of(layer)) is not None],
        shapes,
        sample,
        (model.loss.weight, model.loss.ignore_index, _identity(model.loss.function)),
        sorted({_identity(type(module).forward) for module in model.layers.modules()}),
        options.model_dump(),
        [sorted(styles_of(name, layer).items()) for name, layer in named_layers(model.layers)] if options.tensor_parallel else [],
        sorted(precision.items()) if isinstance(precision, dict) else precision,
        arithmetic(),
        optimizer,
        (torch.__version__, hetpipe.__version__),
        {k: v.model_dump() for k, v in cluster.device_types.items()},
    ]
    where = [hosts or os.uname().nodename, [(n.name, n.devices, n.host) for n in cluster.nodes]]
    named = "-".join([model.name, *(hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in (content, where))])
    return os.path.join(options.cache or os.path.join(".hetpipe", "profiles"), f"{named}.json")


def _settings(model: Model) -> list[Any]:
    """Numbers and texts that modules keep beside what they print (heads of an attention, or how it is computed)."""
    found = []
    for name, module in model.layers.named_modules():
        own = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str) and k != "training"}
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        found.append((name, sorted(own.items()), attention))
    return found


def _identity(function: Callable[..., Any]) -> str:
    """What a function does, as far as its code and what is bound to it tell."""
    if isinstance(function, partial):
        return f"{_identity(function.func)} of {function.args!r}, {sorted(function.keywords.items())!r}"
    if isinstance(function, nn.Module):
        return f"{function!r} {_identity(type(function).forward)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__} {function!r}".split(" at 0x")[0]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    bound = [repr(x).split(" at 0x")[0] for x in (*cells, *(getattr(function, "__defaults__", None) or ()))]
    text = repr((code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")], bound))
    return f"{function.__module__}.{function.__qualname__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
