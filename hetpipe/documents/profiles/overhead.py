"""What a profile says of the framework beside the layers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hetpipe.files.formats import Bytes, BytesPerSecond, Factor, Name, Seconds, Strict


class DeviceOverhead(Strict):
    """What the framework takes on one type of device, as it was measured (what is left out was not): seconds that it adds to a
    forward or a backward; bytes of a card that its allocator does not have, and of each communicator; bytes that the
    allocator holds over those in use; which part of a transfer is hidden behind compute; bytes/s between the device and its
    host's memory, and which part of such a copy is hidden behind compute; the most bytes that the device could give to a run
    (`memory_bytes`, found when one had no more: plans never use more, whatever the cluster says). `relative_spread`: of each."""

    device_type: Name
    action_seconds: Seconds | None = None
    device_bytes: Bytes | None = None
    communicator_bytes: Bytes | None = None
    allocator_factor: Annotated[Factor, Field(ge=1)] | None = None
    transfer_overlap: Annotated[Factor, Field(le=1)] | None = None
    host_bytes_per_second: BytesPerSecond | None = None
    host_copy_overlap: Annotated[Factor, Field(le=1)] | None = None
    memory_bytes: Bytes | None = None
    relative_spread: dict[Name, Factor] = {}
