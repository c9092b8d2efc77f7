"""Documents of a cluster and a plan, to be changed, and what is said of those that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError


def cluster_document(**changes: Any) -> dict[str, Any]:
    return {
        "format": "hetpipe.cluster/1",
        "device_types": {"a": {"memory": 100}},
        "nodes": [{"name": "n0", "devices": {"a": 2}}],
        "link": {"bandwidth": 1.0},
    } | changes


def plan_document(**changes: Any) -> dict[str, Any]:
    return {
        "format": "hetpipe.plan/1",
        "model": "test",
        "global_batch": 4,
        "replicas": [
            {
                "microbatch_sizes": [2, 2],
                "stages": [{"layers": [0, 1], "devices": ["n0/0"]}, {"layers": [1, 3], "devices": ["n0/1"]}],
            }
        ],
    } | changes


def refused(cls: type[Cluster] | type[Plan] | type[Profile], document: Any, *messages: str) -> None:
    with pytest.raises(InputError) as caught:
        cls.parse(document, "the.file")
    text = str(caught.value)
    assert text.startswith("the.file: ")
    for message in messages:
        assert message in text
