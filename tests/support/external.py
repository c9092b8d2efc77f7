"""Data that is not in the repository: in the folder that HETPIPE_DATA names, or what needs it is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.building.datasets import find_data


def external(name: str) -> tuple[Path, pytest.MarkDecorator]:
    """A folder, and the mark of tests that need it."""
    found = find_data(name)
    return found or Path(name), pytest.mark.skipif(found is None, reason=f"HETPIPE_DATA names no folder that holds {name!r}")


CIFAR10, NEEDS_CIFAR10 = external("cifar-10-batches-bin")
SAILOR, NEEDS_SAILOR = external("sailor")
