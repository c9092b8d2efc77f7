"""A plan into a file: SVG and PNG hold the partition, HTML the whole report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetpipe.files.writing import check_output, write_bytes, write_text
from hetpipe.planning.alternatives import EQUAL, equal_split, other_rules
from hetpipe.planning.front import Front
from hetpipe.predict.footprint import with_memory
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.show.scene import Scene, make_scene
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.clusters.assumed import with_assumed
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile

PICTURES = (".svg", ".png", ".html")


@dataclass(frozen=True, kw_only=True)
class Given:
    """A plan, and what is given with it. `cluster` has the profile's links; with both there is a simulated step."""

    plan: Plan
    profile: Profile | None = None
    cluster: Cluster | None = None
    measured: Timeline | None = None
    front: Front | None = None

    @property
    def problem(self) -> tuple[Profile, Cluster] | None:
        """Profile and cluster where both are known."""
        return (self.profile, self.cluster) if self.profile is not None and self.cluster is not None else None

    def predicted(self) -> Timeline | None:
        """The simulated step, with memory over time."""
        if self.problem is None:
            return None
        return with_memory(simulate(self.plan, *self.problem), self.plan, *self.problem)

    def too_full(self, predicted: Timeline) -> dict[str, dict[str, int]]:
        """Each device that needs more memory than it has, and both."""
        assert self.cluster is not None
        limits = {device: self.cluster.type_of(device).memory for device in predicted.peak_bytes}
        return {
            device: {"needs_bytes": peak, "has_bytes": limits[device]}
            for device, peak in predicted.peak_bytes.items() if peak > limits[device]
        }  # fmt: skip

    def unused(self) -> list[str]:
        """The devices of the cluster that the plan leaves idle."""
        used = set(self.plan.device_ids)
        return [device.id for device in self.cluster.devices if device.id not in used] if self.cluster is not None else []

    def scene(self, predicted: Timeline | None, equal: Plan | None) -> Scene:
        """The plan as it is shown, beside the equal split."""
        own = {"profile": self.profile, "cluster": self.cluster}
        beside = None
        if equal is not None and self.problem is not None:
            beside = make_scene(equal, **own, timeline=simulate(equal, *self.problem))  # type: ignore[arg-type]
        return make_scene(self.plan, **own, timeline=predicted, equal=beside)  # type: ignore[arg-type]


def given(
    plan: Plan, *, profile: Profile | None = None, cluster: Cluster | None = None, measured: Timeline | None = None,
    front: Front | None = None, source: str = "the plan",
) -> Given:  # fmt: skip
    """What belongs together; InputError if it does not."""
    if cluster is not None and profile is not None:
        cluster = profile.joined(with_assumed(cluster, profile))
    plan.check(profile=profile, cluster=cluster, source=source)
    profile = profile.at(plan.precision) if profile is not None else None
    return Given(plan=plan, profile=profile, cluster=cluster, measured=measured, front=front)


def scene_of(shown: Given) -> tuple[Scene, Timeline | None]:
    """The scene beside the equal split, which is planned, and the simulated step."""
    predicted = shown.predicted()
    equal = equal_split(other_rules(shown.plan, *shown.problem, EQUAL)) if shown.problem is not None else None
    return shown.scene(predicted, equal.plan if equal is not None else None), predicted


def draw_plan(
    shown: Given, path: str | Path, *, what_if: bool = True, progress: Callable[[str], None] = lambda _: None
) -> None:
    """Draw into `path`: .svg, .png (needs matplotlib) or .html, by its suffix. A page plans other clusters too (`what_if`), of
    which it tells `progress`. InputError for another suffix."""
    check_output(path, *PICTURES)
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        from hetpipe.show.page.report import report_page

        write_text(path, report_page(shown, what_if=what_if, progress=progress))
        return
    canvas = partition_canvas(scene_of(shown)[0])
    if suffix == ".svg":
        write_text(path, canvas.to_svg())
    else:
        write_bytes(path, canvas.to_png())
