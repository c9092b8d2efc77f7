"""Split layers with DoRA adapters, and beside bases in few bits. That training is training on one device stands in
test_transparency.py (the family "split")."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.support.ranks import cluster_of, run_ranks
from tests.support.split_adapters import Found, from_plan_to_plan, measured_bytes, split_and_whole

NETS = ("DoRA", "DoRA, dropout", "fp8", "int8", "int8, DoRA", "nf4", "nf4, DoRA")


@functools.cache
def every(degree: int) -> list[dict[str, list[Found]]]:
    """What each of so many ranks found."""
    return run_ranks(split_and_whole, cluster_of(degree), NETS)


def found(net: str, degree: int) -> list[Found]:
    """Of each split layer, on each rank."""
    return [own for rank in every(degree) for own in rank[net]]


ALL = [(net, degree) for net in NETS for degree in (2, 3)]


@pytest.mark.parametrize(("net", "degree"), ALL)
def test_a_split_layer_computes_what_the_whole_one_does(net: str, degree: int) -> None:
    layers = found(net, degree)
    assert len(layers) == 9 * degree
    assert max(own.apart for own in layers) < 1e-10
    assert not [own.left for own in layers if own.left], "undone, it is what it was"


@pytest.mark.parametrize(("net", "degree"), [(net, degree) for net, degree in ALL if net.startswith(("fp8", "int8", "nf4"))])
def test_a_shard_in_few_bits_has_the_bits_of_the_whole_matrix(net: str, degree: int) -> None:
    layers = found(net, degree)
    assert not [own.unlike for own in layers if own.unlike]
    assert not [own.large for own in layers if own.large]
    assert sum(own.few for own in layers) > 10


def test_a_checkpoint_goes_from_wide_to_narrow_and_back_bit_by_bit(tmp_path: Path) -> None:
    """So do the adapters as peft has them, and what tells the base, whose matrices are shards on two of the devices."""
    first, *others = run_ranks(from_plan_to_plan, cluster_of(3), str(tmp_path))[0]
    assert len(others) == 2
    assert any("lora_magnitude_vector" in name for name in first.state)
    assert first.base is not None
    for other in others:
        assert other.state.keys() == first.state.keys()
        assert all(torch.equal(other.state[name], tensor) for name, tensor in first.state.items())
        assert other.exported == first.exported
        assert other.base == first.base


def test_the_bytes_of_split_layers_in_few_bits_are_measured() -> None:
    for measured, held in run_ranks(measured_bytes, cluster_of(2))[0]:
        assert measured == held
