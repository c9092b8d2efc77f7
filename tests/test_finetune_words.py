"""What `hetpipe finetune` reads of the words for emulated cards and for adapters."""

from __future__ import annotations

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.sections.adapter import parse_lora
from hetpipe.finetune.emulated import parse_emulated
from tests.support.chats import refusal


def test_emulated_cards() -> None:
    found = parse_emulated(["3090:24GiB:4, 2x1080ti:11GiB:10", "3090:24GiB:4"])
    cluster = Cluster.parse(found, "it")
    assert [(d.id, d.type) for d in cluster.devices] == [
        ("n0/0", "3090"),
        ("n0/1", "1080ti"),
        ("n0/2", "1080ti"),
        ("n1/0", "3090"),
    ]
    assert cluster.type_of("n0/1").memory == 11 * 2**30
    assert cluster.device_types["3090"].emulate is not None
    assert cluster.device_types["3090"].emulate.slowdown == 4.0


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("3090", "cannot read '3090'. Write name:memory:slowdown"),
        ("0x3090:1GiB:2", "cannot read '0x3090:1GiB:2'"),
        ("3090:1GiB:0.5", "a slowdown is a number from 1"),
        ("3090:1parsec:2", "cannot read '1parsec'"),
        ("a:1GiB:2,a:2GiB:2", "'a' is given with two memories or slowdowns"),
        ("99999x9:1GiB:2", "device"),
    ],
)
def test_emulated_cards_that_cannot_be(text: str, wrong: str) -> None:
    assert wrong in refusal(parse_emulated, machines=[text])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rank=8", "unknown key 'rank'; known: r, alpha"),
        ("r", "r has no value"),
        ("base=nf4", "base is not given here. Use --base"),
        ("train_also=norms", "train_also is not given here. Use --set adapter.train_also of hetpipe finetune"),
        ("targets=q_proj,v_proj", "join the names of targets by '+', as in targets=q_proj+v_proj"),
        ("targets=[q_proj]", "targets are names joined by '+'"),
        ("none,", "none means that all parameters train, so write it alone"),
        ("r=8,", "there is nothing between two commas, or after the last"),
        ("targets=q_proj+", "targets are names joined by '+', or all-linear"),
        ("r=8,r=16", "r is given twice"),
        ("8", "unknown key '8'"),
    ],
)
def test_adapters_that_cannot_be(text: str, wrong: str) -> None:
    assert wrong in refusal(parse_lora, text=text)
