"""Cached profiles: what they depend on, and that they are measured again when they no longer hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetpipe
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.layers.model import Loss, Model, cross_entropy, mse
from hetpipe.measuring import cache, confirm
from hetpipe.measuring.cache import cache_path, measured
from hetpipe.measuring.confirm import Glance, differs, glance
from hetpipe.measuring.links import FlowFound, Wires
from hetpipe.measuring.profiler import profile_model
from hetpipe.processes.world import World
from tests.support.ranks import cluster_of, run_ranks


class Repeated(nn.Module):
    """What it does depends on a number that it does not print."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x.sin()
        return x


class Edited(Repeated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cos()


def model(*layers: nn.Module, name: str = "net", loss: Any = mse, **how: Any) -> Model:
    torch.manual_seed(0)
    return Model(
        name=name,
        layers=nn.Sequential(*layers),
        inputs=torch.randn(4, 8),
        targets=torch.randn(4, 8),
        loss=Loss(function=loss, **how),
    )


def scaled(factor: float) -> Any:
    return lambda output, targets: factor * mse(output, targets)


def test_the_cache_knows_what_changes_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ProfileSection(cache=str(tmp_path))
    plain, slow = cluster_of(2), {"cpu": {"memory": 9, "emulate": {"slowdown": 2}}}
    emulated = Cluster.parse({**plain.model_dump(), "device_types": slow}, "the test's")

    def path(
        *layers: nn.Module,
        on: Cluster = plain,
        how: ProfileSection = options,
        optimizer: str = "AdamW",
        hosts: tuple[str, ...] = ("a", "a"),
        **more: Any,
    ) -> str:
        made = model(*(layers or (nn.Linear(8, 8), nn.ReLU())), **more)
        return cache_path(made, on, how, optimizer, hosts)

    others = [
        path(nn.Linear(8, 9), nn.ReLU()),
        path(nn.Linear(8, 8), nn.GELU()),
        path(nn.Linear(8, 8).requires_grad_(False), nn.ReLU()),
        path(name="other"),
        path(nn.Linear(8, 8), Repeated(2)),
        path(nn.Linear(8, 8), Repeated(4)),
        path(nn.Linear(8, 8), Edited(4)),
        path(on=cluster_of(1, 1)),
        path(on=emulated),
        path(how=ProfileSection(cache=str(tmp_path), repeats=9)),
        path(optimizer="SGD"),
        path(hosts=("a", "b")),
        path(loss=cross_entropy),
        path(loss=partial(cross_entropy, ignore_index=0)),
        path(loss=scaled(2.0)),
        path(loss=scaled(3.0)),
        path(loss=nn.L1Loss()),
        path(weight="tokens"),
        path(weight="tokens", ignore_index=7),
    ]
    assert path() == path(nn.Linear(8, 8), nn.ReLU())
    assert path(loss=scaled(2.0)) == path(loss=scaled(2.0))
    mine = path()
    assert mine.startswith(str(tmp_path))
    monkeypatch.setattr(hetpipe, "__version__", "99")
    assert len({mine, path(), *others}) == 2 + len(others)


@pytest.mark.parametrize(
    ("then", "least", "median", "off"),
    [
        (0.010, 0.0110, 0.0114, False),
        (0.010, 0.0116, 0.0117, True),
        (0.010, 0.0100, 0.0500, False),  # something else kept the machine busy
        (0.010, 0.0086, 0.0088, False),
        (0.010, 0.0060, 0.0086, True),
        (0.0001, 0.00025, 0.00029, False),  # a fifth of a millisecond
    ],
)
def test_what_is_off(then: float, least: float, median: float, off: bool) -> None:
    assert differs(then, least, median) is off


def test_a_glance_takes_the_heaviest_layers_and_leaves_everything_as_it_was() -> None:
    layers = [nn.Linear(8, 8), Repeated(3000), nn.LayerNorm(8), Repeated(2000), Repeated(1000), nn.Linear(8, 8)]
    whole = model(*layers)
    profile = profile_model(whole, microbatch_sizes=[1, 2, 4], repeats=1)
    before = {name: value.clone() for name, value in whole.layers.state_dict().items()}
    state = torch.get_rng_state()
    rows = tuple(tuple(size * seconds for seconds in (1e-4, 3e-2, 1e-4, 2e-2, 1e-2, 1e-4)) for size in (1, 2, 4))
    then = profile.measurements[0].model_copy(update={"forward_seconds": rows, "backward_seconds": rows})
    seen = glance(whole, then, torch.device("cpu"))
    assert seen.layers == ("1", "3", "4")
    forward, backward = then.times(2)
    assert seen.then == pytest.approx(float((forward + backward)[[1, 3, 4]].sum()))
    assert 0 < seen.least <= seen.median
    assert all(torch.equal(before[name], value) for name, value in whole.layers.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in whole.layers.parameters())


def test_a_glance_at_layers_that_take_long_takes_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(nn.Linear(8, 8), Repeated(9), nn.Linear(8, 8))
    profile = profile_model(whole, microbatch_sizes=[1], repeats=1)
    slow = profile.measurements[0].model_copy(update={"forward_seconds": ((50.0, 9.0, 20.0),)})
    monkeypatch.setattr(confirm, "_seconds", lambda *_: [1.0])
    assert glance(whole, slow, torch.device("cpu")).layers == ("1",)


def twice(world: World, cluster: Cluster, folder: str) -> dict[str, Any]:
    """Measured; taken from the cache; the links of the cache changed; its device found slower; one of its nodes gone."""
    whole, options = model(nn.Linear(8, 8), nn.ReLU()), ProfileSection(cache=folder, microbatch_sizes=(1, 2), repeats=1)
    heard: list[str] = []
    vars(cache)["say"] = heard.append
    told = {"factor": 1.0}

    def look(model: Model, measurement: Any, device: torch.device) -> Glance:
        return Glance(("0",), 0.1, 0.1 * told["factor"], 0.1 * told["factor"])

    instead = vars(confirm)
    instead["glance"] = look

    def now() -> Profile:
        return measured(whole, cluster, world, options, TorchNamed(name="SGD"))

    first = now()
    instead["ping_pong"] = lambda _, pair, sizes, repeats: [[known(first, pair).seconds(size)] for size in sizes]
    again = now()
    instead["ping_pong"] = lambda _, pair, sizes, repeats: [[known(first, pair).seconds(size) * 4 + 0.001] for size in sizes]
    slow = tuple(link.model_copy(update={"bandwidth": 1e6}) for link in first.links)
    instead["measure_links"] = lambda *_: Wires(slow, (), (FlowFound("n0", "n1", 1, 1e6, 0.1),))
    slower = now()
    quiet = len(heard)
    instead["ping_pong"] = lambda _, pair, sizes, repeats: [[known(slower, pair).seconds(size)] for size in sizes]
    kept = now()
    assert len(heard) == quiet
    told["factor"] = 1.3
    anew = now()
    told["factor"] = 1.0
    there = replace(world, rank_of={"n0/0": 0})
    left = measured(whole, cluster.without(["n1/0"]), there, options, TorchNamed(name="SGD"))
    return {"profiles": [first, again, slower, kept, anew, left], "heard": heard}


def known(profile: Profile, pair: Any) -> Any:
    return next(link for link in profile.links if link.between == (pair.a, pair.b))


def test_a_cached_profile_is_compared_with_the_devices_and_links_now(tmp_path: Path) -> None:
    cluster = cluster_of(1, 1)
    one, two = run_ranks(twice, cluster, cluster, str(tmp_path))
    assert one["profiles"] == two["profiles"]
    assert two["heard"] == []
    first, again, slower, kept, anew, left = one["profiles"]
    assert again == first
    assert slower.measurements == first.measurements
    assert [link.bandwidth for link in slower.links] == [1e6]
    assert kept == slower  # the new links are in the cache
    links, device = one["heard"]
    assert links.startswith("the cached profile's links no longer hold, and were measured again: n0 – n1: 4 MiB took ")
    assert ", now 4." in links
    assert device == (
        "the cached profile no longer holds, measuring again: '0' took 100 ms on n0/0 (cpu) when measured, now 130 ms (+30%)"
    )
    assert anew.measurements != first.measurements
    assert left.measurements == anew.measurements


@pytest.mark.parametrize(
    ("nodes", "is_covered"),
    [
        ({"n0": {"devices": {"a": 1}, "hosts": ["x"]}}, True),
        ({"n0": {"devices": {"a": 2, "b": 1}, "hosts": ["x"]}, "n1": {"devices": {"a": 1}, "hosts": ["y"]}}, True),
        ({"n0": {"devices": {"a": 3}, "hosts": ["x"]}}, False),
        ({"n0": {"devices": {"a": 1}, "hosts": ["y"]}}, False),
        ({"n2": {"devices": {"a": 1}, "hosts": ["x"]}}, False),
    ],
)
def test_a_profile_of_more_devices_serves_for_some_of_them(tmp_path: Path, nodes: dict[str, Any], is_covered: bool) -> None:
    more = {"n0": {"devices": {"a": 2, "b": 1}, "hosts": ["x"]}, "n1": {"devices": {"a": 1}, "hosts": ["y"]}}
    whole = model(nn.Linear(8, 8))
    found = profile_model(whole, microbatch_sizes=[1], repeats=1).model_copy(update={"provenance": {"nodes": more}})
    found.save(tmp_path / "net-what-where.json")
    found.model_copy(update={"provenance": {}}).save(tmp_path / "net-what-older.json")
    found.save(tmp_path / "net-other-where.json")
    taken = cache._of_more(str(tmp_path / "net-what-here.json"), nodes)
    assert (taken is not None) == is_covered
    assert cache._of_more(str(tmp_path / "net-third-here.json"), nodes) is None
