"""The partition as text, for a terminal of LEAST_COLUMNS or more.

replica 0: 64 of 64 samples, in 64 micro-batches of 1
s0 desk/0 RTX-3090 · layers 0–12 · 15.4 of 24.0 GiB, 64 %
█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓█▓██o//\\.│
computes 12.6 s (forward 3.41 s, backward 9.21 s); idle 1.2 s (link 901 ms)
↓ 1.00 GiB, 901 ms a step, desk to old
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hetpipe.files.units import human_seconds
from hetpipe.predict.idle import CAUSES, Cause
from hetpipe.show.picture.canvas import printable
from hetpipe.show.picture.partition import MOST_BARS
from hetpipe.show.picture.theme import COLOURS, type_colour
from hetpipe.show.words import (
    drawn_devices,
    edge_text,
    equal_split_text,
    explanations,
    headlines,
    idle_text,
    lane_title,
    layer_range,
    memory_text,
    origin_text,
    percent,
    work_share,
    work_text,
)
from hetpipe.study.scene import LaneScene, Scene, StageScene

LETTERS: dict[Cause, str] = {
    "fill and drain": "/",
    "slower stage": "\\",
    "link": ".",
    "gradient sum": "+",
    "slower optimizer": "=",
    "overhead": "-",
}
LEAST_COLUMNS = 60  # of a terminal, below which its bars say little
_NAME = 30  # columns of a name


@dataclass(frozen=True)
class TextPicture:
    """A scene for `rich` to print, as wide as the terminal, at most `width`; on a narrow one only its first lines."""

    scene: Scene
    width: int = 100

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scene, width = self.scene, min(self.width, options.max_width)
        yield Text(printable(f"{scene.plan.model}: {origin_text(scene.plan)}"), style="bold")
        yield from map(Text, headlines(scene))
        if width < LEAST_COLUMNS:
            yield Text(f"no picture: it needs {LEAST_COLUMNS} columns, and this terminal has {width}\n", style="dim")
            return
        many = len(scene.stages) > MOST_BARS
        for lane in scene.lanes:
            yield Text("\n" + lane_title(lane, scene), style="bold")
            for stage in lane.stages:
                yield from [self._line(lane, stage, width - 1)] if many else self._stage(lane, stage, width - 1)
        if scene.equal is not None and scene.equal.seconds is not None:
            yield Text(f"\n{equal_split_text(scene.equal)}: {human_seconds(scene.equal.seconds)} a step", style="dim")
            for _, stage in [] if many else scene.equal.stages:
                yield _bar(scene.equal, stage, self._seconds, width - 1, ghost=True)
        yield self._legend()
        yield from (Text(line, style="dim") for line in explanations(scene))

    @property
    def _seconds(self) -> float:
        scene = self.scene
        equal = scene.equal.seconds if scene.equal is not None and scene.equal.seconds is not None else 0.0
        return max(scene.seconds or 0.0, equal)

    def _stage(self, lane: LaneScene, stage: StageScene, width: int) -> RenderResult:
        many = "layers" if len(stage.tiles) > 1 else "layer"
        parts = [
            f"s{stage.number} {drawn_devices(lane, stage)}",
            f"{many} {layer_range(stage.layers)}",
            work_share(lane, stage),
            memory_text(stage),
        ]
        heading = Text(printable(" · ".join(part for part in parts if part)))
        if stage.recomputed:
            heading.append(" · recomputed")
        if stage.offloaded:
            heading.append(" · offloaded")
        if stage.fullness is not None and stage.fullness > 1:
            heading.append(" · does not fit", style="bold red")
        if stage.limits_step:
            heading.append(" · limits the step", style="bold yellow")
        yield heading
        yield _bar(self.scene, stage, self._seconds, width)
        if stage.forward is not None:
            work = ", ".join(f"{name} {seconds}" for name, seconds in work_text(stage))
            idle = ", ".join(f"{cause} {seconds}" for cause, seconds in idle_text(stage))
            text = f"computes {human_seconds(stage.busy)} ({work}); idle {human_seconds(stage.idle_total)}"
            yield Text(text + (f" ({idle})" if idle else ""), style="dim")
        if stage.edge is not None:
            a, b = stage.edge.between
            yield Text(f"↓ {edge_text(stage.edge)}, {f'inside {a}' if a == b else f'{a} to {b}'}", style="dim")

    def _line(self, lane: LaneScene, stage: StageScene, width: int) -> Text:
        """A stage in one line, where there are many: its device, or how many it stands for; layers, bar, memory."""
        who = stage.named if lane.count == 1 else f"{lane.count} ×"
        name = printable(f"s{stage.number} {who} {stage.kind} {layer_range(stage.layers)}")
        full = f" {percent(stage.fullness)}" if stage.fullness is not None else ""
        left = min(_NAME, width // 3)
        line = Text(f"{name[:left]:<{left}} ", style="bold" if stage.limits_step else "", no_wrap=True, overflow="crop")
        bar = _bar(self.scene, stage, self.scene.seconds or 0.0, width - left - 8)
        return line.append_text(bar).append(full, style="bold red" if (stage.fullness or 0.0) > 1 else "dim")

    def _legend(self) -> Text:
        shares = self.scene.idle_shares()
        if self.scene.equal is not None and len(self.scene.stages) <= MOST_BARS:  # its bars stand here, too
            shares = {cause: share + shares.get(cause, 0.0) for cause, share in self.scene.equal.idle_shares().items()}
        causes = "  ".join(f"{LETTERS[cause]} {cause}" for cause in CAUSES if shares.get(cause, 0.0) > 0)
        if self.scene.seconds is None:
            return Text("\none column or more a layer: █ ▓ in turn", style="dim")
        ends = "│ end of the step" + ("  ¦ bound" if self.scene.bound is not None else "")
        return Text(f"\n█ ▓ layers in turn  o optimizer  {causes}  {ends}", style="dim")


def _bar(scene: Scene, stage: StageScene, seconds: float, width: int, *, ghost: bool = False) -> Text:
    """A stage along the seconds of the step: its layers in turn, its optimizer, its idle time by cause."""
    if stage.forward is None:
        scale, parts = width / scene.plan.layer_count, [(" ", "", float(stage.layers[0]))]
        parts += [("▓" if i % 2 else "█", "", 1.0) for i in range(len(stage.tiles))]
    else:
        scale = (width - 1) / seconds if seconds > 0 else 0.0
        kinds = list(scene.memories)
        place = kinds.index(stage.kind) if stage.kind in kinds else None
        colour = "dim" if ghost else COLOURS[type_colour(place)][0]
        parts = [("▓" if i % 2 else "█", colour, tile.seconds or 0.0) for i, tile in enumerate(stage.tiles)]
        parts.append(("o", colour, stage.optimizer))
        parts += [(LETTERS[cause], "dim", stage.idle.get(cause, 0.0)) for cause in CAUSES]
    text, done = Text(no_wrap=True, overflow="crop"), 0.0
    for letter, colour, part in parts:
        text.append(letter * (round((done + part) * scale) - round(done * scale)), style=colour)
        done += part
    if stage.forward is not None:
        text.append("│")
        if scene.bound is not None and not ghost and (at := round(scene.bound * scale)) < len(text) - 1:
            text = Text.assemble(text[:at], Text("¦", style="bold"), text[at + 1 :], no_wrap=True, overflow="crop")
    return text
