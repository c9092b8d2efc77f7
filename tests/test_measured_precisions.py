"""At which precisions devices are measured, what a lower one costs in memory and on the wire, and by which flags of torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe import InputError
from hetpipe.documents.cluster import Cluster, Emulate
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.number_types import NumberTypes, Precision
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.precisions import PrecisionChoice
from hetpipe.documents.profile import Profile
from hetpipe.layers.device import MemoryMeter, static_storages
from hetpipe.layers.model import Loss, Model, mse
from hetpipe.layers.numbers import computing
from hetpipe.layers.recipe import make_stage
from hetpipe.measuring import cache, layer_run, profiler
from hetpipe.measuring.cache import cache_path, note_arithmetic
from hetpipe.measuring.precision.casts import _Casts, kept_copies
from hetpipe.measuring.precision.choice import Able, able, card_able, check_parameters, chosen_precisions
from hetpipe.measuring.precision.layer_bytes import saved_bytes
from hetpipe.measuring.profiler import assemble, measure_device
from hetpipe.predict.cost import Costs
from hetpipe.processes.arithmetic import arithmetic, other_flags
from hetpipe.processes.world import World
from hetpipe.training.session import _emulation
from tests.support.strategies import make_cluster, make_profile

CPU = torch.device("cpu")
BF16 = NumberTypes.at("bf16")
TWO: dict[Precision, float] = {"fp32": 6.0, "fp16": 1.5}
ABLE = {
    "new": card_able("A100", (8, 0)),
    "old": card_able("Tesla T4", (7, 5)),
    "older": card_able("GTX 960", (5, 2)),
    "cpu": able(CPU),
    "two": able(CPU, Emulate(slowdown=TWO)),
    "one": able(CPU, Emulate(slowdown=2.0)),
}
ALONE = World(rank=0, size=1, device_id=None, rank_of={}, ranks=(0,), control=None)


def machines(*kinds: str) -> Cluster:
    emulated: dict[str, Any] = {"two": TWO, "one": 2.0}
    types = {kind: {"memory": 10**9} | ({"emulate": {"slowdown": emulated[kind]}} if kind in emulated else {}) for kind in kinds}
    nodes = [{"name": "n0", "devices": dict.fromkeys(kinds, 1)}]
    return Cluster.parse({"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes, "link": {"bandwidth": 1e9}}, "it")


def chosen(choice: PrecisionChoice | None, *kinds: str) -> dict[str, tuple[Precision | None, ...]]:
    return chosen_precisions(choice, machines(*kinds), {kind: ABLE[kind] for kind in kinds})


def test_which_precisions_are_measured() -> None:
    assert chosen(None, "new", "two") == {"new": (None,), "two": (None,)}
    assert chosen("auto", *ABLE) == {
        "new": ("fp32", "fp16", "bf16"),
        "old": ("fp32", "fp16"),
        "older": ("fp32",),
        "cpu": ("fp32", "bf16"),
        "two": ("fp32", "fp16"),
        "one": ("fp32", "bf16"),
    }
    assert chosen("fp16", "old", "cpu", "two") == dict.fromkeys(("old", "cpu", "two"), ("fp16",)), "by name on a CPU, too"
    assert chosen({"new": "bf16"}, "new", "old") == {"new": ("bf16",), "old": ("fp32",)}


@pytest.mark.parametrize(
    ("choice", "kinds", "told"),
    [
        ("bf16", ("new", "old"), "'old' cannot compute in bf16: it is a Tesla T4 .* 7.5, which has fp32, fp16"),
        ("bf16", ("two",), "'two' cannot compute in bf16: it has fp32, fp16, the precisions of its slowdown in the cluster file"),
        ({"older": "fp16"}, ("older", "cpu"), "'older' cannot compute in fp16: it is a GTX 960 .* 5.2, which has fp32"),
        ({"odl": "fp16"}, ("old",), "unknown device type 'odl'"),
    ],
)
def test_a_precision_that_a_type_does_not_have_is_refused(choice: Any, kinds: tuple[str, ...], told: str) -> None:
    with pytest.raises(InputError, match=told):
        chosen(choice, *kinds)


@pytest.mark.parametrize(
    ("slowdown", "told"),
    [
        ({}, "slowdown: write a number, or one for each precision that the device has: {fp32: 6.0, fp16: 1.5}"),
        ({"fp8": 2.0}, "slowdown: unknown precision 'fp8'; known: fp32, fp16, bf16"),
        ({"fp16": 0.5}, "slowdown: fp16: a slowdown is a number from 1 to 1e\\+06, got 0.5"),
        (True, "slowdown: a slowdown is a number from 1 to 1e\\+06, got True"),
    ],
)
def test_a_slowdown_that_cannot_be(slowdown: Any, told: str) -> None:
    kind = {"memory": 1, "emulate": {"slowdown": slowdown}}
    with pytest.raises(InputError, match=told):
        Cluster.parse({**json.loads(machines("cpu").to_json()), "device_types": {"cpu": kind}}, "it")


def paced(host: dict[str, float]) -> Profile:
    """A profile of one layer on `two`, whose host was measured at these precisions."""
    document = json.loads(make_profile({"two": [1.0]}).to_json())
    row = document["measurements"][0]
    tables = [
        row | {"device_type": "host", "precision": precision, "forward_seconds": [[seconds]]}
        for precision, seconds in host.items()
    ]
    document["measurements"] = [row | {"precision": "fp32"}, row | {"precision": "fp16"}]
    return Profile.parse(document | {"host": tables[0], "hosts": tables[1:]}, "the profile")


def one_stage(precision: Precision | None) -> Plan:
    replica = ReplicaPlan(microbatch_sizes=(1,), stages=(StagePlan(layers=(0, 1), devices=("n0/0",)),))
    return Plan(model="test", global_batch=1, replicas=(replica,), precision={"two": precision} if precision else None)


def test_an_emulated_device_is_paced_by_what_it_computes_in() -> None:
    """6 times 0.5 s in fp32, 1.5 times 0.75 s in fp16: the host itself is not faster in fp16."""
    profile, cluster = paced({"fp32": 0.5, "fp16": 0.75}), machines("two")
    for precision, seconds in (("fp32", 3.0), ("fp16", 1.125)):
        found = _emulation(cluster, profile, one_stage(precision), "n0/0")  # type: ignore[arg-type]
        assert found is not None
        assert found.seconds("F", 0, 1, 1) == pytest.approx(seconds)
    other = profile.model_copy(update={"measurements": (profile.measurements[0].model_copy(update={"precision": "bf16"}),)})
    with pytest.raises(
        InputError, match="'two' cannot compute in bf16, because the cluster file gives its slowdown only for fp32, fp16"
    ):
        _emulation(cluster, other, one_stage("bf16"), "n0/0")
    with pytest.raises(InputError, match=r"no 'host' measurement at fp16, which .* Measured: fp32. .* profile --precision fp16'"):
        _emulation(cluster, paced({"fp32": 1.0}), one_stage("fp16"), "n0/0")


def test_the_hosts_of_a_profile_are_read_as_they_were_written() -> None:
    profile = paced({"fp32": 0.5, "fp16": 0.75})
    assert Profile.parse(json.loads(profile.to_json()), "again") == profile
    assert profile.host_at("fp32") == profile.host_at(None) == profile.host
    plain = make_profile({"a": [1.0]})
    assert "hosts" not in json.loads(plain.to_json())
    with pytest.raises(InputError, match=r"no 'host' measurement, which .* Measured: none"):
        plain.host_at(None)


def net() -> nn.Sequential:
    """A layer that trains, one that is frozen, one without a product, and one that trains."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    layers[2].requires_grad_(False)
    return layers


def model(layers: nn.Sequential) -> Model:
    return Model(name="net", layers=layers, inputs=torch.randn(2, 8), targets=torch.randn(2, 4), loss=Loss(function=mse))


def test_copies_that_a_step_keeps_are_counted_apart_from_what_a_sample_saves() -> None:
    """Of two bytes each: weight and bias of the layers that train. The frozen weight is cast in each forward, and saved there."""
    saved = saved_bytes(model(net()), CPU, BF16)
    assert saved.cast == [2 * (8 * 16 + 16), 0, 0, 0, 2 * (16 * 4 + 4)]
    assert saved.per_sample == [
        2 * 8,  # the input's copy
        2 * 16,  # the output, which the next layer has as its input
        2 * 16 * 16,  # the copy of the frozen weight
        2 * 16 + 4 + 4,  # its input, mean and deviation
        2 * 16 + 4 * 4,  # its input; what the loss keeps beside the target, in float32
    ]
    assert saved.first == [2 * 8, 2 * 16, 2 * 16 * 16, 4 + 4, 4 * 4]  # without what enters
    assert saved_bytes(model(net()), CPU).cast == [0] * 5


def test_a_copy_is_kept_until_the_end_of_the_step_recomputed_or_not() -> None:
    for recompute in (False, True):
        stage, casts = make_stage(net(), 0, 5, recompute=recompute), _Casts()
        with computing(BF16, CPU), casts:
            for _ in range(3):
                stage(torch.randn(2, 8)).sum().backward()
        trained = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
        names = [name for copy, _ in casts.seen for name, p in trained if p is copy.parameter]
        assert sorted(names) == ["0.bias", "0.weight", "4.bias", "4.weight"]
    with computing(BF16, CPU):
        assert len(kept_copies(nn.Sequential(nn.Linear(8, 8)), lambda: None)) == 0


def test_casts_are_timed_once_a_step_with_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layers that train: the two with products have a weight and a bias."""
    timed: list[list[torch.dtype]] = []
    monkeypatch.setattr(profiler, "cast_again", lambda copies: timed.append([copy.dtype for copy in copies]))
    measure_device(model(net()), "a", CPU, (1,), torch.optim.SGD, repeats=1, precision="bf16")
    assert timed == [[torch.bfloat16] * 2, [], [torch.bfloat16] * 2]
    timed.clear()
    measure_device(model(net()), "a", CPU, (1,), torch.optim.SGD, repeats=1)
    assert timed == [[], [], []]


def test_on_a_card_each_backward_that_is_timed_casts_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are timed with the copies that there are; those before a backward, and as many to subtract, make new ones."""
    done: list[str] = []

    class Watch:
        def __init__(self, _: torch.device) -> None: ...

        def measure(self, action: Any) -> float:
            done.append("|")
            action()
            return 1.0

    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: done.append("F"))
    monkeypatch.setattr(layer_run, "Stopwatch", Watch)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: done.append("new"))
    run = layer_run.LayerRun(layer, (torch.ones(2, 4),), None)
    monkeypatch.setattr(layer_run.LayerRun, "backward", lambda _: done.append("B"))
    layer_run.turn_seconds(run, torch.device("cuda"))
    assert " ".join(done) == "| F B | | F | new F | new F B"


def bf16_profile() -> tuple[nn.Sequential, Profile]:
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    whole = model(layers)
    found = measure_device(whole, "a", CPU, (1,), torch.optim.SGD, repeats=1, precision="bf16")
    return layers, assemble(whole, [found.measurement], 0.0)


def test_memory_in_a_lower_precision_is_what_a_stage_of_several_micro_batches_takes() -> None:
    """Counted as on an emulated device, of a step that enters autocast once. What is predicted beyond that are copies that
    backward does not need: of biases, and of the first weight, whose input has no gradient."""
    layers, profile = bf16_profile()
    for sizes in ((2, 2, 2), (1,), (3, 3, 3, 3)):
        stage = make_stage(layers, 0, 5)
        meter = MemoryMeter(exclude=static_storages(stage))
        flying = []
        with computing(BF16, CPU):
            for size in sizes:
                inputs = torch.randn(size, 8)
                with meter.hooks():
                    output = stage(inputs)
                    loss = mse(output, torch.randn(size, 4))
                flying.append((loss, output))
        memory = Costs(profile, make_cluster([{"a": 1}])).stage_memory("a", 0, 5, samples=sum(sizes))
        parameters = sum(p.nbytes for p in layers.parameters())
        kept = memory.held_per_sample - float(profile.output_bytes[-1]) + profile.target_bytes_per_sample
        predicted = memory.static - 2 * parameters + sum(sizes) * kept
        unused = 2 * (32 + 32 + 4) + 2 * 8 * 32
        assert predicted == meter.used + unused
        del flying, loss, output


def test_what_leaves_a_layer_is_priced_as_the_widest_of_the_precisions() -> None:
    _, profile = bf16_profile()
    assert list(profile.output_bytes) == [2 * 32, 2 * 32, 2 * 32, 2 * 32, 2 * 4]
    low = profile.measurements[0]
    full = low.model_copy(
        update={"precision": "fp32", "saved_bytes_per_sample": None, "output_bytes_per_sample": None, "cast_bytes": None}
    )
    beside = full.model_copy(update={"device_type": "b"})
    whole = profile.model_copy(update={"measurements": (low, full, beside)})
    assert whole.at({"a": "bf16"}).output_bytes[0] == 4 * 32, "b sends 4 bytes"
    alone = profile.model_copy(update={"measurements": (low, full)})
    assert alone.at({"a": "bf16"}).output_bytes[0] == 2 * 32
    assert alone.at({"a": "fp32"}).output_bytes[0] == 4 * 32
    costs = [
        Costs(alone.at({"a": name}), make_cluster([{"a": 1}, {"a": 1}], link={"bandwidth": 64.0, "latency": 0.0}))
        for name in ("bf16", "fp32")
    ]
    assert [c.transfer("n0/0", "n1/0", 1, 1)[0] for c in costs] == [1.0, 2.0]
    assert [float(c.stage_memory("a", 0, 1, samples=1).static) for c in costs] == [2 * 4 * 288 + 2 * 288, 2 * 4 * 288]


def test_a_stage_holds_what_it_receives_in_the_precision_of_the_sender_and_in_its_own() -> None:
    """32 numbers enter layer 1: 4 bytes of each cross, 2 are those of the copy, or of what crosses and is widened."""
    _, profile = bf16_profile()
    low = profile.measurements[0]
    full = {
        "device_type": "b",
        "precision": "fp32",
        "saved_bytes_per_sample": low.saved_bytes_per_sample,
        "cast_bytes": None,
        "output_bytes_per_sample": None,
    }
    both = profile.model_copy(update={"measurements": (low, low.model_copy(update=full))})
    mixed, alone = (Costs(p, make_cluster([{"a": 1, "b": 1}])) for p in (both, profile))
    for recompute in (False, True):
        held = [c.stage_memory("a", 1, 3, samples=4, recompute=recompute).held_per_sample for c in (alone, mixed)]
        wider = 2 * 32 * (3 if recompute else 2)  # received, between its layers under recompute, and sent
        assert held[1] - held[0] == wider + 2 * 32
        first = [c.stage_memory("a", 0, 1, samples=4, recompute=recompute).held_per_sample for c in (alone, mixed)]
        assert first[1] - first[0] == 2 * 32, "what it sends"


def test_recomputed_stages_hold_the_copies_too() -> None:
    _, profile = bf16_profile()
    costs = Costs(profile, make_cluster([{"a": 1}]))
    plain, again = (costs.stage_memory("a", 0, 5, samples=4, recompute=recompute) for recompute in (False, True))
    assert plain.static == again.static


def test_the_cache_knows_precisions_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def path(precision: Any = None) -> str:
        return cache_path(model(net()), machines("cpu", "one"), ProfileSection(), "SGD", ("h",), precision)

    choices = [None, "auto", "bf16", {"cpu": "bf16"}, {"cpu": "bf16", "one": "fp32"}]
    paths = [path(choice) for choice in choices]
    assert len(set(paths)) == len(choices)
    assert path({"one": "fp32", "cpu": "bf16"}) == paths[-1], "in any order"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    assert path() != paths[0]


def test_a_profile_file_that_was_measured_with_other_flags_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(cache, "warn", heard.append)
    then = arithmetic() | {"cudnn.deterministic": not torch.backends.cudnn.deterministic}
    profile = make_profile({"a": [1.0]}).model_copy(update={"provenance": {"arithmetic": then}})
    note_arithmetic(profile, ALONE, "profile.json")
    assert heard == [], "without a card the flags change nothing"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    note_arithmetic(profile, ALONE, "profile.json")
    note_arithmetic(make_profile({"a": [1.0]}), ALONE, "profile.json")
    (told,) = heard
    assert told.startswith("warning: profile.json was measured with other arithmetic: torch.backends.cudnn.deterministic was ")
    assert other_flags(then, then) == ""


@pytest.mark.parametrize(
    ("frozen", "trained", "told"),
    [
        (torch.bfloat16, torch.float32, None),
        (torch.float64, torch.float32, "float64"),
        (torch.float32, torch.bfloat16, "bfloat16"),
    ],
)
def test_parameters_are_of_float32_where_a_precision_is_asked_for(
    frozen: torch.dtype, trained: torch.dtype, told: str | None
) -> None:
    """But those that do not train may have fewer bits."""
    layers = net()
    layers[2].to(frozen)
    layers[4].to(trained)
    check_parameters(model(layers), None)
    if told is None:
        check_parameters(model(layers), "bf16")
        return
    with pytest.raises(
        InputError, match=f"precision is 'bf16', which needs .* in float32, but parameters of this model are {told}."
    ):
        check_parameters(model(layers), "bf16")


def test_what_a_type_is() -> None:
    assert ABLE["two"] == Able(("fp32", "fp16"), ("fp32", "fp16"), "the precisions of its slowdown in the cluster file")
    assert ABLE["old"].what == "a Tesla T4 of compute capability 7.5"
