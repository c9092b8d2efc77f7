"""What the profiler says of layers whose bytes can be counted by hand, and that it leaves them as they were."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError
from hetpipe.layers.device import Emulation
from hetpipe.layers.model import LOSSES, Loss, Model, evaluating
from hetpipe.measuring.measure import measurers, profile_cluster
from hetpipe.measuring.precision.layer_bytes import layer_profiles, saved_bytes
from hetpipe.measuring.profiler import check_sizes, default_type_name, measure_device, profile_model
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.world import World
from tests.support.ranks import _rank_program, run_ranks
from tests.support.user_parts import tied

CPU = torch.device("cpu")


def model(
    *layers: nn.Module, inputs: Tensor | None = None, targets: Tensor | None = None, loss: str = "mse", name: str = "test"
) -> Model:
    """Layers on 2 samples of 8 features, float32."""
    inputs = torch.randn(2, 8) if inputs is None else inputs
    net = nn.Sequential(*layers)
    with evaluating(net):
        wanted = net(inputs) if targets is None else targets
    return Model(name=name, layers=net, inputs=inputs, targets=wanted.detach(), loss=Loss(function=LOSSES[loss]))


def test_bytes_of_linear_relu_and_layer_norm() -> None:
    """Per sample, float32: Linear keeps its input; ReLU its output, the storage that the next layer keeps too (counted once, with
    ReLU); LayerNorm its mean and deviation beside; mse the output, and the target, which is counted apart. The first layer of a
    stage does not keep what enters it."""
    made = model(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    rows, input_bytes = layer_profiles(made, CPU)
    F = 4
    assert input_bytes == 8 * F
    assert [row.name for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row.parameter_bytes for row in rows] == [(8 * 16 + 16) * F, 0, (16 * 4 + 4) * F, 2 * 4 * F, (4 * 2 + 2) * F]
    assert [row.output_bytes_per_sample for row in rows] == [16 * F, 16 * F, 4 * F, 4 * F, 2 * F]
    assert [row.saved_bytes_per_sample for row in rows] == [8 * F, 16 * F, 0, (4 + 1 + 1) * F, 4 * F + 2 * F]
    assert [row.first_saved_bytes_per_sample for row in rows] == [0, 16 * F, 0, (1 + 1) * F, 2 * F]
    assert {row.buffer_bytes for row in rows} == {0}
    assert {row.tied for row in rows} == {None}


class TwiceSaved(nn.Module):
    """x · x keeps x twice; the view keeps the same storage a third time."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x + x.view(-1, 2, 4).reshape(-1, 8) * x


def test_a_storage_counts_once_and_parameters_never() -> None:
    found = saved_bytes(model(nn.Linear(8, 8), TwiceSaved(), nn.Linear(8, 8, bias=False)), CPU).per_sample
    assert found[0] == 8 * 4  # its input, not its weight
    assert found[1] == 8 * 4  # the Linear's output, once
    assert found[2] == 8 * 4 + 8 * 4  # its input (the sum, a new storage), and what mse keeps beside the target


def test_half_precision_has_half_the_bytes() -> None:
    def rows(dtype: torch.dtype) -> list[tuple[int, int, int]]:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)
        sample = torch.zeros(1, 8, dtype=dtype)
        made = Model(name="t", layers=net, inputs=sample, targets=net(sample).detach(), loss=Loss(function=LOSSES["mse"]))
        return [(r.parameter_bytes, r.output_bytes_per_sample, r.saved_bytes_per_sample) for r in layer_profiles(made, CPU)[0]]

    double, half = rows(torch.float64), rows(torch.bfloat16)
    assert double == [(4 * a, 4 * b, 4 * c) for a, b, c in half]


def test_tied_parameters_are_named_and_their_bytes_known() -> None:
    loss = Loss(function=LOSSES["cross_entropy"])
    made = Model(name="tied", layers=tied(), inputs=torch.randn(1, 8), targets=torch.tensor([1]), loss=loss)
    rows, _ = layer_profiles(made, CPU)
    assert [row.tied for row in rows] == ["0.weight", None, None, None, "0.weight", None]
    assert [row.tied_parameter_bytes for row in rows] == [8 * 16 * 4, 0, 0, 0, 8 * 16 * 4, 0]
    assert rows[0].parameter_bytes == rows[4].parameter_bytes == 8 * 16 * 4


@pytest.mark.parametrize("table", [True, False])
def test_what_trains_is_known_of_each_layer_and_of_what_layers_share(table: bool) -> None:
    """Of six layers the third has a frozen weight of 16 x 16, and the table that two share trains or not; the last trains."""
    net = tied()
    net[0].weight.requires_grad_(table)
    net[2].weight.requires_grad_(False)
    loss = Loss(function=LOSSES["cross_entropy"])
    made = Model(name="tied", layers=net, inputs=torch.randn(1, 8), targets=torch.tensor([1]), loss=loss)
    rows, _ = layer_profiles(made, CPU)
    kept = None if table else 0
    assert [row.trained_bytes for row in rows] == [kept, None, 16 * 4, None, kept, None]
    assert [row.tied_trained_bytes for row in rows] == [kept, None, None, None, kept, None]
    assert [row.tied_trained for row in rows] == [8 * 16 * 4 * table, 0, 0, 0, 8 * 16 * 4 * table, 0]


class Counted(nn.Module):
    """A linear layer that counts the backwards through it (elsewhere: what a layer keeps is put back)."""

    def __init__(self, number: int, *, trains: bool) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8).requires_grad_(trains), number

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if output.requires_grad:
            output.register_hook(lambda _: BACKWARDS.append(self.number))
        return output


BACKWARDS: list[int] = []


def test_layers_below_the_first_that_trains_are_measured_without_backward() -> None:
    """As they are trained: a frozen layer above it has one, for the gradient of its input."""
    BACKWARDS.clear()
    layers = [Counted(number, trains=trains) for number, trains in enumerate((False, False, True, False, True))]
    made = model(*layers)
    profile = profile_model(made, microbatch_sizes=[2], repeats=2, optimizer=functools.partial(torch.optim.SGD, momentum=0.9))
    assert set(BACKWARDS) == {2, 3, 4}
    weight = (8 * 8 + 8) * 4
    assert [layer.trained for layer in profile.layers] == [0, 0, weight, 0, weight]
    assert [layer.saved_bytes_per_sample > 0 for layer in profile.layers] == [False, False, True, False, True]
    assert [seconds > 0 for seconds in profile.measurements[0].optimizer_seconds] == [False, False, True, False, True]
    assert profile.optimizer.state_bytes_per_parameter_byte == 1.0


def test_one_module_at_two_positions_is_two_layers() -> None:
    relu, shared = nn.ReLU(), nn.Linear(8, 8)
    rows, _ = layer_profiles(model(shared, relu, nn.Linear(8, 8), relu, shared), CPU)
    assert [row.name for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row.tied for row in rows] == ["0.weight", None, None, None, "0.weight"]
    assert rows[0].tied_parameter_bytes == (8 * 8 + 8) * 4
    profile = profile_model(model(shared, relu, nn.Linear(8, 8), relu, shared), microbatch_sizes=[1], repeats=1)
    assert len(profile.measurements[0].optimizer_seconds) == 5


def test_buffers_are_counted_and_unchanged_and_so_are_weights() -> None:
    made = model(nn.Linear(8, 8), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(8, 8), inputs=torch.randn(2, 3, 8))
    before = {name: value.clone() for name, value in made.layers.state_dict().items()}
    profile = profile_model(
        made, microbatch_sizes=[2], repeats=2, optimizer=functools.partial(torch.optim.SGD, lr=1.0, weight_decay=1.0)
    )
    assert [row.buffer_bytes for row in profile.layers] == [0, 2 * 3 * 4 + 8, 0, 0]
    after = made.layers.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in made.layers.parameters())


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (torch.optim.AdamW, 2.0),
        (functools.partial(torch.optim.AdamW, amsgrad=True), 3.0),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1.0),
        (functools.partial(torch.optim.SGD, lr=0.1), 0.0),
    ],
)
def test_optimizer_state_per_parameter_byte(factory: Callable[..., torch.optim.Optimizer], expected: float) -> None:
    made = model(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    profile = profile_model(made, microbatch_sizes=[1], repeats=1, optimizer=factory)
    assert profile.optimizer.state_bytes_per_parameter_byte == expected
    assert profile.measurements[0].optimizer_seconds[1] == 0.0
    assert profile.measurements[0].optimizer_seconds[0] > 0.0


class Alternating(nn.Module):
    """Layers pass tuples, of which a part is integers and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, index = value if isinstance(value, tuple) else (value, torch.zeros(len(value), dtype=torch.int64))
        return self.linear(x), index + 1


class Last(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] * value[1][:, None]


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)],
        lambda: [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Linear(8, 8)],
        lambda: [Alternating(), Alternating(), Last()],
        lambda: [nn.Identity(), nn.Flatten(), nn.Linear(8, 8), nn.Identity()],
        lambda: [nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)],
    ],
    ids=["in place", "in place first", "tuples", "without parameters", "frozen"],
)
def test_a_profile_of_any_layers_has_every_number(layers: Callable[[], Sequence[nn.Module]]) -> None:
    made = model(*layers())
    profile = profile_model(made, device_type="here", microbatch_sizes=[3, 2], repeats=2)
    (found,) = profile.measurements
    count = len(made.layers)
    assert (found.device_type, found.microbatch_sizes) == ("here", (1, 2, 3))
    assert found.forward.shape == found.backward.shape == (3, count)
    assert (found.forward > 0).all()
    assert (found.backward >= 0).all()
    assert profile.model == "test"
    assert profile.provenance["repeats"] == 2
    assert Profile.parse(profile.model_dump(mode="json"), "again") == profile


def test_an_emulated_device_lasts_its_multiple_of_the_host() -> None:
    """Sleeping cannot end early, so 'at least' holds on any machine, however busy."""
    made = model(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    host = Measurement(
        device_type="host",
        microbatch_sizes=(1, 2),
        forward_seconds=((0.001, 0.002, 0.003),) * 2,
        backward_seconds=((0.004, 0.0, 0.001),) * 2,
        optimizer_seconds=(0.002, 0.0, 0.001),
    )
    emulation = Emulation(slowdown=3.0, host=host, memory_bytes=10**9)
    found = measure_device(made, "slow", CPU, (1, 2), torch.optim.AdamW, repeats=2, emulation=emulation).measurement
    assert (found.forward >= 3 * host.forward).all()
    assert (found.backward >= 3 * host.backward).all()
    assert all(a >= 3 * b for a, b in zip(found.optimizer_seconds, host.optimizer_seconds, strict=True))


def test_sizes() -> None:
    assert check_sizes([8, 2, 2]) == (1, 2, 8)
    with pytest.raises(InputError, match=r"micro-batch sizes must be at least 1, got \[0, 3\]"):
        check_sizes([3, 0])
    assert default_type_name(CPU) == "cpu"


def test_a_layer_that_needs_more_than_one_sample_is_named() -> None:
    with pytest.raises(InputError, match=r"layer '1' \(BatchNorm1d\) does not run on a micro-batch of 1 sample, .*than 1 value"):
        profile_model(model(nn.Linear(8, 8), nn.BatchNorm1d(8)), repeats=1)


def test_a_layer_that_refuses_the_sample_s_values_is_named() -> None:
    """A fake tensor has none: only what is measured shows it."""
    words = torch.full((2, 3), 99)
    with pytest.raises(InputError, match=r"layer '0' \(Embedding\) does not run on a micro-batch of 1 sample, .*: IndexError: "):
        profile_model(model(nn.Embedding(9, 8), inputs=words, targets=torch.ones(2, 3, 8)), repeats=1)


def test_progress_is_told_for_every_layer_size_and_optimizer_step() -> None:
    said: list[str] = []
    profile_model(model(nn.Linear(8, 8), nn.ReLU()), microbatch_sizes=[1, 2], repeats=1, advance=said.append)
    assert said == [
        f"layer {number} of 2 ({name}), {what}"
        for number, name in ((1, "0"), (2, "1"))
        for what in ("1 sample", "2 samples", "optimizer")
    ]


def test_a_layer_gets_its_values_once_for_all_that_is_timed_and_once_for_its_bytes() -> None:
    class Late(nn.Linear):
        def values(self, names: Collection[str]) -> dict[str, Tensor]:
            given.append(self.out_features)
            return {name: torch.zeros(self.get_parameter(name).shape) for name in names}

    given: list[int] = []
    made = model(nn.Linear(8, 8), inputs=torch.zeros(2, 8), targets=torch.zeros(2, 7))
    late = dataclasses.replace(made, layers=nn.Sequential(Late(8, 9, device="meta"), Late(9, 7, device="meta")))
    found = profile_model(late, microbatch_sizes=[1, 2, 4, 8], repeats=1).measurements[0]
    assert found.microbatch_sizes == (1, 2, 4, 8)
    assert given == [9, 7, 9, 7]


def test_out_of_memory_at_a_large_size_leaves_the_smaller_ones() -> None:
    class Greedy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    found = profile_model(model(Greedy(8, 8)), microbatch_sizes=[1, 2, 4, 8], repeats=1).measurements[0]
    assert found.microbatch_sizes == (1, 2)
    found = profile_model(model(nn.Linear(8, 8), Greedy(8, 8)), microbatch_sizes=[1, 4, 8], repeats=1).measurements[0]
    assert (found.microbatch_sizes, [len(row) for row in found.forward_seconds]) == ((1,), [2]), "in a later layer, too"
    with pytest.raises(torch.OutOfMemoryError):
        measure_device(model(Greedy(8, 8)), "x", CPU, (4,), torch.optim.AdamW)


def measure_here(world: World, cluster: Cluster, whole_nodes: bool = False) -> Profile:
    return profile_cluster(
        model(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        cluster,
        world,
        ProfileSection(microbatch_sizes=(1, 3), repeats=2),
        torch.optim.AdamW,
        whole_nodes=whole_nodes,
    )


def mixed(**fast: Any) -> Cluster:
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {"slow": {"memory": "1 GiB", "emulate": {"slowdown": 4}}, "fast": {"memory": "1 GiB", **fast}},
            "nodes": [{"name": "n0", "devices": {"slow": 1, "fast": 1}}, {"name": "n1", "devices": {"fast": 1}}],
        },
        "mixed",
    )


def test_every_type_of_a_cluster_measures_itself_and_all_ranks_have_one_profile() -> None:
    cluster = mixed()
    profiles = run_ranks(measure_here, cluster, cluster)
    assert profiles[0] == profiles[1] == profiles[2]
    found: Profile = profiles[0]
    assert sorted(m.device_type for m in found.measurements) == ["fast", "slow"]
    assert {m.microbatch_sizes for m in found.measurements} == {(1, 3)}
    assert found.provenance["devices"] == {"slow": "n0/0", "fast": "n0/1"}
    assert found.host is not None
    assert (found.measurement("slow").forward >= 4 * found.host.forward).all()
    assert [link.between for link in found.links] == [("n0", "n0"), ("n0", "n1")]
    assert all(link.latency > 0 and link.bandwidth is not None and link.bandwidth > 0 for link in found.links)


BOXES = Cluster.parse(
    {
        "format": "hetpipe.cluster/1",
        "device_types": {kind: {"memory": "1 GiB"} for kind in "abc"},
        "nodes": [{"name": "n0", "devices": {"a": 1, "b": 2}}, {"name": "n1", "devices": {"b": 1, "c": 1}}],
    },
    "two boxes",
)


def test_who_measures_which_type() -> None:
    def found(rank_of: dict[str, int], *, whole_nodes: bool = True) -> dict[str, tuple[str, int]]:
        who = measurers(BOXES, rank_of, whole_nodes=whole_nodes)
        return {kind: (device.id, rank) for kind, (device, rank) in who.items()}

    one_each = {"n0/0": 0, "n1/0": 1}
    assert found(one_each) == {"a": ("n0/0", 0), "b": ("n1/0", 1), "c": ("n1/1", 1)}
    assert found({"n0/0": 2, "n0/1": 0, "n1/0": 1}) == {"a": ("n0/0", 2), "b": ("n0/1", 0), "c": ("n1/1", 1)}
    everyone = {device.id: rank for rank, device in enumerate(BOXES.devices)}
    assert found(everyone) == found(everyone, whole_nodes=False) == {"a": ("n0/0", 0), "b": ("n0/1", 1), "c": ("n1/1", 4)}
    for rank_of, whole_nodes, kinds in ((one_each, False, ["c"]), ({"n0/0": 0}, True, ["c"]), ({"n0/1": 0}, False, ["a", "c"])):
        with pytest.raises(InputError) as caught:
            found(rank_of, whole_nodes=whole_nodes)
        assert str(caught.value) == (
            f"no process of this job can measure the device types {kinds}, because the job has only the devices "
            f"{sorted(rank_of)} of "
            "['n0/0', 'n0/1', 'n0/2', 'n1/0', 'n1/1']. Start processes for the other devices, too, or give the job a profile"
        )


def test_one_process_a_node_measures_all_types_of_its_node() -> None:
    one_each = [BOXES.device("n0/0"), BOXES.device("n1/0")]
    first, second = start_ranks(_rank_program, (measure_here, BOXES, (BOXES, True)), one_each)
    assert first == second
    assert sorted(m.device_type for m in first.measurements) == ["a", "b", "c"]
    assert first.provenance["devices"] == {"a": "n0/0", "b": "n1/0", "c": "n1/1"}
    assert [link.between for link in first.links] == [("n0", "n1")]
