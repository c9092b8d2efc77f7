"""hetpipe/uneven/: each sample once, in unequal parts; DDP's gradient is that of the whole batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetpipe.building.data import EpochSampler
from hetpipe.files.messages import InputError
from hetpipe.uneven import ShareLoader, ShareSampler, batch_shares, global_count, global_mean, process_group, windows
from hetpipe.uneven.shares import measured_shares, plan_shares, share_out
from tests.support.commands import free_port
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.uneven_ranks import Case, gradients, oddities

share_lists = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)
accumulations = st.integers(1, 3)
seeds = st.integers(0, 100)


def samplers(samples: int, shares: list[int], **options: Any) -> list[ShareSampler]:
    """One a rank."""
    ranks = [ShareSampler(samples, shares, rank=rank, **options) for rank in range(len(shares))]
    for sampler in ranks:
        sampler.empty_batches = True
    return ranks


@given(share_lists, st.data())
def test_shares_of_a_partial_batch(shares: list[int], draw: st.DataObject) -> None:
    batch = draw.draw(st.integers(1, sum(shares)))
    parts = batch_shares(shares, batch)
    assert sum(parts) == batch
    assert all(0 <= part <= share for part, share in zip(parts, shares, strict=True))
    if batch >= sum(share > 0 for share in shares):
        assert all(part > 0 for part, share in zip(parts, shares, strict=True) if share)
    if batch == sum(shares):
        assert parts == shares


@given(st.integers(1, 60), share_lists, accumulations, seeds)
def test_each_sample_once_an_epoch_in_the_order_of_one_device(
    samples: int, shares: list[int], accumulate: int, seed: int
) -> None:
    ranks, batch = samplers(samples, shares, accumulate=accumulate, seed=seed), sum(shares)
    for epoch in (0, 3):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        order = EpochSampler(samples, batch, seed=seed).order(epoch)
        epochs = [list(windows(sampler, accumulate)) for sampler in ranks]  # [rank][step][part]
        assert {len(sampler) for sampler in ranks} == {accumulate * len(steps) for steps in epochs}
        for whole, *steps in zip(order.split(batch), *epochs, strict=True):
            assert [index for parts in steps for part in parts for index in part] == whole.tolist()
            assert [sum(map(len, parts)) for parts in steps] == batch_shares(shares, len(whole))
            assert all(len(parts) == accumulate for parts in steps)
            assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in steps)


@given(st.integers(1, 60), share_lists, share_lists, accumulations, st.integers(0, 20))
def test_resuming_with_other_ranks_sees_the_rest_once(
    samples: int, before: list[int], after: list[int], accumulate: int, steps: int
) -> None:
    first, second = samplers(samples, before, accumulate=accumulate, seed=5), samplers(samples, after)
    for sampler in first:
        sampler.set_epoch(2)
    seen: list[int] = []
    steps = min(steps, len(first[0]) // accumulate)
    for sampler in first:
        batches = list(sampler)  # a loader with workers draws ahead of training
        seen += [index for part in batches[: steps * accumulate] for index in part]
    ended = len(seen) == samples
    (state,) = {tuple(sampler.state_dict(steps * accumulate).items()) for sampler in first}
    for sampler in second:
        sampler.load_state_dict(dict(state))  # type: ignore[arg-type]
        assert sampler.epoch == (3 if ended else 2)
        sampler.set_epoch(sampler.epoch)  # as training loops do
        if not ended:
            seen += [index for part in sampler for index in part]
    assert sorted(seen) == list(range(samples))
    for sampler in second:
        sampler.set_epoch(9)
    assert sorted(i for sampler in second for part in sampler for i in part) == list(range(samples))


def test_a_state_in_the_midst_of_a_resumed_epoch() -> None:
    sampler = ShareSampler(40, [6, 2], rank=1, shuffle=False)
    running = iter(sampler)
    assert [next(running), next(running)] == [[6, 7], [14, 15]]
    state = sampler.state_dict(2)
    assert (state["epoch"], state["position"]) == (0, 16)
    again = ShareSampler(40, [3, 1], rank=0)
    again.load_state_dict(state)
    assert len(again) == 6
    assert next(iter(again)) == [16, 17, 18]
    assert again.state_dict(3)["position"] == 28
    assert len(list(again)) == 6
    assert len(again) == 10  # the next epoch
    assert again.state_dict(6)["epoch"] == 1


def test_epochs_differ_and_the_seed_decides() -> None:
    def order(epoch: int, seed: int = 4) -> list[list[int]]:
        sampler = ShareSampler(100, [6, 4], rank=0, seed=seed)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(sampler)
        return list(sampler)

    orders = [order(epoch) for epoch in range(4)]
    assert all(a != b for a, b in pairwise(orders))
    assert order(0, seed=5) != orders[0]


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (dict(shares=[3, -1], rank=0), "the shares [3, -1] must not be negative, and not all zero"),
        (dict(shares=[], rank=0), "the shares [] must not be negative, and not all zero"),
        (dict(shares=[3], rank=0, accumulate=0), "accumulate must be at least 1, got 0"),
        (dict(shares=[3, 1], rank=2), "rank 2 has no share in [3, 1], which are for 2 ranks"),
        (dict(shares=[3, 1]), "there are 2 shares for 1 ranks (no process group, and no torchrun)"),
    ):
        with pytest.raises(InputError) as error:
            ShareSampler(10, **arguments)
        assert str(error.value).startswith(message)
    sampler = ShareSampler(9, [6, 2], rank=0)
    with pytest.raises(InputError) as error:
        next(iter(sampler))
    assert str(error.value) == (
        "a batch of 1 samples has the shares [1, 0], so that a rank has to run a batch of no samples: use "
        "ShareLoader(dataset, sampler) in place of DataLoader(dataset, batch_sampler=sampler)"
    )
    with pytest.raises(InputError, match=r"shares \[6, 2\] in 3 parts each"):
        next(iter(ShareSampler(16, [6, 2], rank=0, accumulate=3)))
    with pytest.raises(InputError, match="3 batches end within an optimizer step of 2"):
        ShareSampler(16, [6, 2], rank=0, accumulate=2).state_dict(3)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ShareSampler(9, [6, 2]).rank == 1
    with pytest.raises(InputError, match=r"there are 3 shares for 2 ranks \(torchrun\)"):
        ShareSampler(9, [6, 2, 1])
    with pytest.raises(InputError, match="2 processes were started .* nothing averages their gradients"):
        global_count(torch.zeros(2))


def test_a_plain_dataloader_where_every_rank_has_samples() -> None:
    dataset = TensorDataset(torch.arange(11.0), torch.arange(11))
    found = [
        labels.tolist()
        for rank in range(2)
        for _, labels in DataLoader(dataset, batch_sampler=ShareSampler(11, [6, 2], rank=rank))
    ]
    assert [len(labels) for labels in found] == [6, 2, 2, 1]
    assert sorted(label for labels in found for label in labels) == list(range(11))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_a_sample_gets_one_that_counts_nothing(workers: int) -> None:
    dataset = TensorDataset(torch.arange(9.0), torch.arange(9))
    loader = ShareLoader(dataset, ShareSampler(9, [6, 2], rank=1, shuffle=False), num_workers=workers)
    (inputs, labels), (stand_in, ignored) = loader
    assert (inputs.tolist(), labels.tolist()) == ([6.0, 7.0], [6, 7])
    assert (stand_in.tolist(), ignored.tolist()) == ([0.0], [-100])
    assert [int(global_count(labels)), int(global_count(ignored))] == [2, 0]


def stand_in_of(samples: list[Any], **options: Any) -> Any:
    return next(iter(ShareLoader(samples, ShareSampler(1, [1, 0], rank=1), **options)))  # type: ignore[arg-type]


def test_stand_ins_of_other_batches() -> None:
    words = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([6, 7])}
    batch = stand_in_of([words])
    assert batch["input_ids"].tolist() == [[5, 6]]
    assert batch["labels"].tolist() == [[-100, -100]]
    inputs, numbers = stand_in_of([(torch.ones(3), 0.5)])
    assert (inputs.shape, numbers.shape) == ((0, 3), (0,))
    assert stand_in_of([torch.ones(3)], stand_in=lambda batch: batch[:0]).shape == (0, 3)
    with pytest.raises(InputError) as error:
        stand_in_of([{"ids": torch.ones(3), "goal": 1}])
    assert str(error.value) == (
        "a batch is a dict of ids, goal, neither (inputs, targets) nor a mapping with 'labels'. Give ShareLoader "
        "a function stand_in=, which makes a batch of one sample count nothing"
    )


def test_counts_are_what_the_mean_divides_by() -> None:
    labels = torch.tensor([[1, -100], [2, 0]])
    assert int(global_count(labels)) == 3
    assert int(global_count(labels, ignore_index=0)) == 3
    assert int(global_count(labels, torch.ones(4, 2), torch.tensor([True, False]))) == 3 + 8 + 2
    assert float(global_mean(torch.tensor(6.0), torch.tensor(3))) == 2.0
    assert float(global_mean(torch.tensor(0.0), torch.tensor(0))) == 0.0


def test_accelerate_leaves_the_loader_as_it_is_and_can_skip_its_batches() -> None:
    accelerate = pytest.importorskip("accelerate")
    dataset = TensorDataset(torch.arange(30.0), torch.arange(30))
    loader = ShareLoader(dataset, ShareSampler(30, [6, 2], rank=1))
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    loader.set_epoch(3)
    batches = [labels.tolist() for _, labels in loader]
    assert [labels.tolist() for _, labels in accelerate.skip_first_batches(loader, 2)] == batches[2:]


FASTSPEED = [  # its partition lists and batch sizes, for which its gradient is wrong
    Case(16, [6, 2]),  # ratio 0.5 there
    Case(18, [6, 2]),  # [13, 5]: 0.68 and 36 % aside in the last step
    Case(20, [6, 2]),  # [12, 8]: 0.125 where a rank has no data
    Case(32, [12, 4], accumulate=2),
    Case(17, [6, 2]),  # a rank without a sample in the last step
]
OTHERS = [
    Case(37, [6, 2], target="tokens"),
    Case(37, [7, 3], accumulate=2, target="tokens"),
    Case(35, [5, 2], accumulate=3),
    Case(17, [6, 2], target="numbers"),
    Case(9, [0, 4]),
]


def test_gradients_in_ddp_are_those_of_the_whole_batch() -> None:
    cases = FASTSPEED + OTHERS
    for found in run_ranks(gradients, cluster_of(2), cases):
        for case, steps in zip(cases, found, strict=True):
            assert len(steps) == -(-case.samples // sum(case.shares))
            for step in steps:
                assert step["ratio"] == pytest.approx(1, abs=1e-10), case
                assert step["aside"] < 1e-10, case
                assert step["loss"] == pytest.approx(0, abs=1e-10), case
            assert max(step["naive"] for step in steps) > 0.01, case  # a mean of means is something else


def test_gradients_of_three_ranks_and_under_autocast() -> None:
    exact, mixed = Case(34, [8, 3, 1], target="tokens"), Case(34, [8, 3, 1], dtype=torch.bfloat16)
    for steps, rounded in run_ranks(gradients, cluster_of(3), [exact, mixed]):
        assert all(step["ratio"] == pytest.approx(1, abs=1e-10) and step["aside"] < 1e-10 for step in steps)
        assert all(step["ratio"] == pytest.approx(1, abs=0.02) and step["aside"] < 0.02 for step in rounded)


def test_what_two_unequal_ranks_must_also_get_right() -> None:
    results = run_ranks(oddities, cluster_of(2))
    assert [result["empty"] for result in results] == [0.0, 0.0]
    assert [result["batch_norm"] for result in results] == [[1, 2], [1, 1]]  # the stand-in is not counted
    assert [result["scaler"] for result in results] == [(512.0, True)] * 2  # both skip the step
    for result in results:
        seen, true = result["clipped"]
        assert seen == pytest.approx(true, rel=1e-12)
        measured = result["measured"]
        assert sum(measured["free"]) == 8
        assert min(measured["free"]) >= 1
        assert sum(measured["tight"]) == 8
        assert measured["tight"][1] <= 3
        assert measured["refused"].startswith("the ranks can hold [3, 3] samples, 6 together, but the global batch is 8")
        assert measured["left"] == (True, True, True)
    assert results[0]["measured"] == results[1]["measured"]


def test_shares_of_measured_rows() -> None:
    fast, slow = [1.0 * c for c in range(1, 9)], [3.0 * c for c in range(1, 9)]
    assert share_out([fast, slow], 8) == [6, 2]
    assert share_out([fast[:4], slow], 8) == [4, 4]  # memory for 4
    with pytest.raises(InputError) as error:
        share_out([fast[:3], slow[:4]], 8)
    assert str(error.value) == (
        "the ranks can hold [3, 4] samples, 7 together, but the global batch is 8 with at least one on each. "
        "Measure for a part of the global batch and accumulate, or leave the smallest device out"
    )
    with pytest.raises(InputError, match=r"can hold \[8, 0\]"):
        share_out([fast, []], 8)


def test_what_does_not_train_takes_only_the_memory_of_its_parameters() -> None:
    """Half as much again as the parameters: with all gradients and AdamW's state they would take five times as much."""
    net = nn.Sequential(nn.Linear(200, 200).requires_grad_(False), nn.Linear(200, 1))
    room = round(1.5 * 4 * sum(p.numel() for p in net.parameters()))
    step = lambda size: net(torch.ones(size, 200)).sum().backward()  # noqa: E731
    assert measured_shares(net, step, 4, memory_bytes=room, repeats=1) == [4]
    net.requires_grad_(True)
    with pytest.raises(InputError, match="the ranks can hold"):
        measured_shares(net, step, 4, memory_bytes=room, repeats=1)


def test_shares_of_a_plan(tmp_path: Any) -> None:
    rows = [
        {"cuts": [3], "sizes": [2], "devices": ["n10/0"]},
        {"cuts": [3], "sizes": [4, 4, 3], "devices": ["n2/1"]},
        {"cuts": [3], "sizes": [1, 1], "devices": ["n2/0"]},
    ]
    plan = make_plan(rows)
    plan.save(tmp_path / "plan.json")
    assert plan_shares(plan) == plan_shares(tmp_path / "plan.json") == ([2, 11, 2], 3)
    with pytest.raises(InputError) as error:
        plan_shares(make_plan([{"cuts": [2, 1], "sizes": [2]}]))
    assert str(error.value) == (
        "replica 0 of the plan is spread over ['n0/0', 'n0/1'], but each rank of a data-parallel loop holds the whole "
        "model. Run this plan with hetpipe.wrap, or make a plan with --partitioner uneven-data-parallel"
    )


def test_the_process_group_ends_with_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless something outside still holds it, which is said; or the function failed, since peers may then hang."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)

    @process_group()
    def count() -> int:
        return int(global_count(torch.tensor([1, -100, 2])))

    @process_group()
    def held() -> Any:
        return dist.group.WORLD

    @process_group()
    def fails() -> float:
        return 1 / 0

    assert count() == count() == 2
    assert not dist.is_initialized()
    with pytest.warns(UserWarning, match="the process group is still held by something outside of the function that trains"):
        group = held()
    assert group is not None
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert dist.is_initialized()
    dist.destroy_process_group()
    monkeypatch.delenv("RANK")
    assert count() == 2  # without a launcher there is none
