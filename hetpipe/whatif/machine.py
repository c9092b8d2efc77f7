"""What was asked for: the cards, as a cluster of one machine, or several; and what a question says by default. Commands import it
without the planner."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from hetpipe.documents.cluster import Cluster, DeviceType, Link, Node
from hetpipe.files.limits import MOST_DEVICES
from hetpipe.files.messages import InputError, shown
from hetpipe.whatif.cards import Card, Cards

_SEVERAL = re.compile(r"([0-9]{1,5})\s*x\s*(.+)")
Machine = tuple[str, ...]  # the cards in it
Optimizer = Literal["adamw", "momentum", "sgd"]
SECONDS = 4.0  # for each row's search


def parse_cards(text: str, cards: Cards) -> Machine:
    """`3090,2x1080ti` as three names. InputError where one is not known."""
    found: list[str] = []
    for part in text.split(","):
        match = _SEVERAL.fullmatch(part.strip())
        count, name = (int(match[1]), match[2]) if match else (1, part.strip())
        if not name or not count:
            raise InputError(f"cannot read the cards {shown(text)}. Write them like '3090,2x1080ti'")
        if len(found) + count > MOST_DEVICES:
            raise InputError(f"{shown(text)} asks for more than {MOST_DEVICES} cards")
        found += [cards.find(name)] * count
    return tuple(found)


def as_cluster(machines: Sequence[Machine], cards: Mapping[str, Card], link: Link, network: Link | None) -> Cluster:
    """Machines n0, n1, … (but for empty ones) with a link between the cards in each, and a network between them."""
    if sum(map(bool, machines)) > 1 and network is None:
        raise InputError(
            f"{len(machines)} machines were given, but no network between them. Give its bandwidth, such as --network '10 Gbit/s'"
        )
    kinds = dict.fromkeys(card for machine in machines for card in machine)
    return Cluster(
        format="hetpipe.cluster/1",
        device_types={kind: DeviceType(memory=cards[kind].memory) for kind in kinds},
        nodes=tuple(
            Node(name=f"n{i}", devices=dict(Counter(machine)), link=link) for i, machine in enumerate(machines) if machine
        ),
        link=network,
    )


def cards_text(machines: Sequence[Machine]) -> str:
    """`3090, 2 × 1080ti`; machines apart by a bar."""
    each = (", ".join(f"{n} × {kind}" if n > 1 else kind for kind, n in Counter(m).items()) for m in machines if m)
    return " | ".join(each)
