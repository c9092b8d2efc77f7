"""The partition, drawn: one lane a replica, one bar a stage, along the seconds of a step.

replica 0: 64 of 64 samples
┌ node desk ───────────────────────────────────────────────┐
│ desk/0 RTX-3090 · layers 0–12          15.4 of 24.0 GiB  │
│ ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ limit ╌ │
│ █emb█|██0██|██1██|██2██| … |██11██|//fill and drain//|   │  as wide as its time, as high as its memory
└──────────────────────────────────────────────────────────┘
  ↓ 128 MiB, 1.2 s a step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.predict.idle import CAUSES
from hetpipe.show.picture.axis import FRAME, MARGIN, Scale, draw_axis, draw_marks, scale_of
from hetpipe.show.picture.canvas import WIDE, Box, Canvas, Group, Stroke, Words, fitting, printable, text_width, wrapped
from hetpipe.show.picture.columns import draw_columns, stage_colour, waiting_box
from hetpipe.show.picture.theme import TYPE_PATTERNS, TYPES, type_colour
from hetpipe.show.words import (
    TIGHT,
    description,
    devices_text,
    drawn_devices,
    edge_text,
    equal_split_text,
    headlines,
    lane_title,
    layer_range,
    memory_text,
    origin_text,
    percent,
    stage_nodes_text,
    stage_sentence,
    work_share,
)
from hetpipe.study.scene import LaneScene, Scene, StageScene, Tile

_NAME = 13.0  # height of a bar that holds a name in its middle
_GHOST = 13.0
_SWATCH, _STRIP = 30.0, 6.0  # widths: of a swatch in the legend, of a bar's beginning in its type's pattern
MOST_BARS = 12  # of more stages each is a column (`columns`)
_MOST_GHOSTS = 48  # of the equal split


def partition_canvas(scene: Scene, width: float = WIDE) -> Canvas:
    """The scene in so many pixels of width."""
    model = printable(scene.plan.model)
    canvas = Canvas(width=width, title=f"{model}: who computes what", description=description(scene))
    _heading(canvas, scene)
    _legend(canvas, scene)
    if len(scene.stages) > MOST_BARS:
        draw_columns(canvas, scene)
        return canvas
    scale = scale_of(scene, width)
    for lane in scene.lanes:
        _lane(canvas, scene, lane, scale)
    if scene.equal is not None:
        _ghost(canvas, scene, scene.equal, scale)
    draw_axis(canvas, scene, scale)
    return canvas


def _heading(canvas: Canvas, scene: Scene) -> None:
    top, room = canvas.groups[0], canvas.width - 2 * MARGIN
    top.words.append(Words(x=MARGIN, y=22, text=fitting(canvas.title, room / 1.1, 16), size=16, bold=True))
    y = 44.0
    for text in (*headlines(scene), origin_text(scene.plan)):
        for line in wrapped(text, room, 11.5):
            top.words.append(Words(x=MARGIN, y=y, text=line, size=11.5, colour="faint"))
            y += 16
    canvas.height = y


def _legend(canvas: Canvas, scene: Scene) -> None:
    """Types of device, then causes of idle time, in as many lines as they need."""
    kinds, entries = list(scene.memories), list[tuple[list[Box], str]]()
    swatch = Box(x=0, y=0, width=_SWATCH, height=14)
    for kind in scene.types():  # as a bar begins: a strip, then layers
        place = kinds.index(kind)
        colour, pattern = type_colour(place), TYPE_PATTERNS[place % TYPES]
        layers = [
            replace(swatch, width=_SWATCH / 2, fill=colour, opacity=0.32),
            replace(swatch, x=_SWATCH / 2, width=_SWATCH / 2, fill=colour, opacity=0.5),
        ]
        strip = replace(swatch, width=_STRIP, fill=colour, opacity=0.55, pattern=pattern)
        frame = replace(swatch, edge=colour, thickness=1.5)
        entries.append(([*layers, strip, frame], f"{kind}, {human_bytes(scene.memories[kind])}"))
    if any(stage.optimizer > 0 for _, stage in scene.stages):
        entries.append(([replace(swatch, fill="ink", opacity=0.75)], "optimizer"))
    for cause, share in scene.idle_shares().items():
        if share >= 0.0005:
            entries.append(([waiting_box(cause, swatch)], f"idle: {cause}, {percent(share)}"))
    top, x, y = canvas.groups[0], MARGIN, canvas.height + 6
    for boxes, name in entries:
        wide = _SWATCH + 6 + text_width(name, 10.5) + 16
        if x > MARGIN and x + wide > canvas.width - MARGIN:
            x, y = MARGIN, y + 20
        top.boxes += [replace(box, x=x + box.x, y=y - 7) for box in boxes]
        top.words.append(Words(x=x + _SWATCH + 6, y=y, text=name, size=10.5))
        x += wide
    y += 12 if entries else 0
    for line in wrapped(_legend_note(scene), canvas.width - 2 * MARGIN, 10):
        y += 4 if entries else 0
        top.words.append(Words(x=MARGIN, y=y, text=line, size=10, colour="faint"))
        y += 10
    canvas.height = y + 8


def _legend_note(scene: Scene) -> str:
    """What stripes, and the patterns at the left end of bars, say."""
    kinds, columns = scene.types(), len(scene.stages) > MOST_BARS
    end = "column's foot" if columns else "bar's left end"
    patterns = f"the pattern at a {end} tells its type of device, not idle time" if len(kinds) > 1 else ""
    return "; ".join(filter(None, ["" if columns else "light and dark stripes are layers", patterns]))


def _lane(canvas: Canvas, scene: Scene, lane: LaneScene, scale: Scale) -> None:
    top, room = canvas.groups[0], canvas.width - 2 * MARGIN
    y = canvas.height + 12
    for line in wrapped(lane_title(lane, scene), room / 1.1, 12.5):
        top.words.append(Words(x=MARGIN, y=y, text=line, size=12.5, bold=True, clear=True))
        y += 17
    y -= 3
    frame = 0.0
    for s, stage in enumerate(lane.stages):
        alone = s == 0 or lane.stages[s - 1].node != stage.node
        if alone and stage.node:
            frame, y = y, y + 18
            name = fitting(stage_nodes_text(stage), room - 2 * FRAME, 10)
            top.words.append(Words(x=MARGIN + FRAME, y=y - 8, text=name, size=10, colour="faint"))
        y = _stage(canvas, scene, lane, stage, scale, y)
        last = s + 1 == len(lane.stages) or lane.stages[s + 1].node != stage.node
        if last and stage.node:
            y += 4
            around = Box(x=MARGIN, y=frame, width=room, height=y - frame, edge="rule", round=5)
            top.boxes.append(around)
        if stage.edge is not None:
            y = _edge(top, stage, scale, y)
    canvas.height = y + 6


def _edge(top: Group, stage: StageScene, scale: Scale, y: float) -> float:
    assert stage.edge is not None
    a, b = stage.edge.between
    where = f"inside {a}" if a == b else f"{a} to {b}"
    x = scale.left + 8
    top.lines.append(Stroke(points=((x, y + 2), (x, y + 18)), thickness=1.5))
    top.lines.append(Stroke(points=((x - 4, y + 13), (x, y + 18), (x + 4, y + 13)), thickness=1.5))
    top.words.append(Words(x=x + 12, y=y + 10, text=f"{edge_text(stage.edge)}, {where}", size=10, colour="faint", clear=True))
    return y + 22


def _stage(canvas: Canvas, scene: Scene, lane: LaneScene, stage: StageScene, scale: Scale, y: float) -> float:
    """One stage from height y on; where it ends."""
    group = canvas.group(stage_sentence(scene, lane, stage), f"{lane.replicas[0]}.{stage.number}")
    y = _stage_labels(canvas, group, scene, lane, stage, scale, y)
    bar, limit = scale.heights(stage.memory, stage.limit)
    top, base = y, y + max(bar, limit) + 3
    colour, pattern = stage_colour(scene, stage)
    end = scale.x(scene.seconds) if scene.seconds is not None else 0.0
    if stage.limit is not None and end:  # what the device has
        group.boxes.append(Box(x=scale.left, y=base - limit, width=end - scale.left, height=limit, fill="panel"))
    at, inside = _tiles(group, scene, stage, scale, base, bar, limit)
    start = scale.x(0.0 if stage.forward is not None else stage.layers[0])
    whole = Box(x=start, y=base - bar, width=at - start, height=bar)
    edge = ("limit", 2.5) if stage.limits_step else (colour, 1.5)
    strip = replace(whole, width=min(_STRIP, whole.width), fill=colour, opacity=0.55, pattern=pattern)
    group.boxes += [strip, replace(whole, edge=edge[0], thickness=edge[1])]
    idle = 0.0
    for cause in CAUSES:
        if (seconds := stage.idle.get(cause, 0.0)) > 0:
            x, to = scale.x(stage.busy + idle), scale.x(stage.busy + idle + seconds)
            tip = f"idle, {cause}: {human_seconds(seconds)}"
            group.boxes.append(waiting_box(cause, Box(x=x, y=base - bar, width=to - x, height=bar, tip=tip)))
            said = f"{cause} {human_seconds(seconds)}"
            if text_width(said, 9.5) + 8 <= to - x:
                middle = _name_height(base, bar, limit)
                group.words.append(Words(x=(x + to) / 2, y=middle, text=said, size=9.5, anchor="middle", clear=True))
            idle += seconds
    draw_marks(group, scene, scale, top, base)
    if stage.limit is not None and stage.memory is not None:
        right = end or at
        group.lines.append(Stroke(points=((scale.left, base - limit), (right, base - limit)), dashed=True))
    return base + 6 + _ends(group, stage, scale, base, inside)


def _ends(group: Group, stage: StageScene, scale: Scale, base: float, inside: Mapping[int, str]) -> float:
    """Below the bar the first and the last layer where their tiles, in which these words stand, do not name them; how high
    that is."""
    unnamed, start = dict[int, tuple[float, float]](), 0.0 if stage.forward is not None else float(stage.layers[0])
    for tile in stage.tiles:
        end = start + (tile.seconds if tile.seconds is not None else 1.0)
        if tile in (stage.tiles[0], stage.tiles[-1]) and inside.get(tile.layer, "") in ("", str(tile.layer)):
            unnamed[tile.layer] = scale.x(start), scale.x(end)
        start = end
    first, last = stage.layers[0], stage.layers[1] - 1
    room, taken = scale.x(start) - scale.x(0.0), 0.0
    for layer, (left, right) in unnamed.items():
        name = stage.tiles[layer - first].name
        full = f"{layer} {name}" if name != str(layer) else str(layer)
        unsaid = [text for text in (full, str(layer)) if text != inside.get(layer)]
        text = next((text for text in unsaid if taken + text_width(text, 9) + 8 <= room), "")
        taken += text_width(text, 9) + 8 if text else 0.0
        place = Words(x=right, y=base + 8, text=text, size=9, anchor="end") if layer == last != first else None
        if text:
            group.words.append(place or Words(x=left, y=base + 8, text=text, size=9))
    return 10.0 if taken else 0.0


def _name_height(base: float, bar: float, limit: float) -> float:
    """Where names stand: in the middle of a bar, above one that is low if there is room below the limit, else at its foot."""
    over = base - _NAME / 2 if limit < bar + _NAME else base - bar - _NAME / 2
    return base - bar / 2 if bar >= _NAME else over


def _stage_labels(
    canvas: Canvas, group: Group, scene: Scene, lane: LaneScene, stage: StageScene, scale: Scale, y: float
) -> float:
    """Who it is, what it has and how full it is: on one line where that has room, else on two; where they end."""
    many = "layers" if len(stage.tiles) > 1 else "layer"
    who = f"{drawn_devices(lane, stage)} · {many} {layer_range(stage.layers)}"
    if stage.recomputed:
        who += ", recomputed"
    if stage.offloaded:
        who += ", offloaded"
    facts = [work_share(lane, stage)]
    if stage.forward is not None and scene.seconds:
        facts.append(f"{human_seconds(stage.busy)}, {percent(stage.busy / scene.seconds)} busy")
    if memory := memory_text(stage):
        facts.append(memory)
    marks = ["limits the step"] if stage.limits_step else []
    if stage.fullness is not None and stage.fullness >= TIGHT:
        marks.append("memory tight" if stage.fullness <= 1 else "does not fit")
    right, size = " · ".join([*facts, *marks]), 11.0
    colour = "limit" if marks else "faint"
    room = scale.room
    for i, line in enumerate(wrapped(who, room / 1.1, size)):
        y += 15 if i else 0
        shown = fitting(line, room / 1.1, size)
        group.words.append(Words(x=scale.left, y=y + 8, text=shown, size=size, bold=True, clear=True))
    if text_width(who, size, bold=True) + text_width(right, 10.5) + 12 <= room:
        group.words.append(Words(x=scale.left + room, y=y + 8, text=right, size=10.5, anchor="end", colour=colour, clear=True))
        return y + 18
    for line in wrapped(right, room, 10.5) if right else ():
        y += 14
        group.words.append(Words(x=scale.left, y=y + 8, text=line, size=10.5, colour=colour, clear=True))
    return y + 18


def _tiles(
    group: Group, scene: Scene, stage: StageScene, scale: Scale, base: float, height: float, limit: float
) -> tuple[float, dict[int, str]]:
    """The layers, and behind them the optimizer, from height `base` up; where they end, and what stands in the tile of a
    layer. Names stand above a bar that is low, if there is room below the limit."""
    y, room = base - height, max(height, _NAME)
    every = _numbered(stage, scale)
    done, colour = 0.0, stage_colour(scene, stage)[0]
    first = float(stage.layers[0]) if stage.forward is None else 0.0
    at, inside = scale.x(first), dict[int, str]()
    for i, tile in enumerate(stage.tiles):
        done += tile.seconds if tile.seconds is not None else 1.0
        end = scale.x(first + done)
        tip = f"layer {tile.layer}" + (f": {tile.name}" if tile.name != str(tile.layer) else "")
        tip += f" ({tile.part})" if _unsaid(tile) else ""
        tip += f", {human_seconds(tile.seconds)} a step" if tile.seconds is not None else ""
        special = {"edge": "ink", "thickness": 1.0} if tile.part else {}
        box = Box(x=at, y=y, width=end - at, height=height, fill=colour, opacity=0.5 if i % 2 else 0.32, tip=tip)
        group.boxes.append(replace(box, **special))  # type: ignore[arg-type]
        left = 7.0 if i == 0 else 1.0
        part = tile.part if _unsaid(tile) else ""
        words = _inside(tile.name, part, str(tile.layer), end - at - left - 1, room)
        if every > 1 and (words is None or words.text == str(tile.layer)):  # a name stays where there is room for it
            words = Words(x=0, y=0, text=str(tile.layer), size=9, anchor="middle") if tile.layer % every == 0 else None
        if words is not None:
            inside[tile.layer] = words.text
            group.words.append(replace(words, x=(at + left + end) / 2, y=_name_height(base, height, limit)))
        at = end
    if stage.optimizer > 0:
        end = scale.x(stage.busy)
        tip = f"optimizer, {human_seconds(stage.optimizer)} a step"
        group.boxes.append(Box(x=at, y=y, width=end - at, height=height, fill="ink", opacity=0.75, tip=tip))
        at = end
    return at, inside


def _numbered(stage: StageScene, scale: Scale) -> int:
    """Every how many layers a number stands, where tiles are too narrow for one each: all bars have numbers."""
    seconds = [tile.seconds if tile.seconds is not None else 1.0 for tile in stage.tiles]
    each = (scale.x(sum(seconds)) - scale.x(0.0)) / len(seconds)
    widest = 10.0  # of numbers that stand upright
    if scale.heights(stage.memory, stage.limit)[0] < text_width(str(stage.layers[1] - 1), 9) + 4:
        widest = text_width(str(stage.layers[1] - 1), 9) + 2
    return next((every for every in (1, 2, 5, 10, 20, 50, 100) if every * each >= widest), len(seconds))


def _unsaid(tile: Tile) -> bool:
    """Whether a layer's name does not say already that it is the embedding, or the head."""
    return bool(tile.part) and tile.part[:4] not in tile.name.lower()


def _inside(name: str, part: str, index: str, width: float, height: float) -> Words | None:
    """A tile's number with its name where all of it fits, across or upright; else with what part it is, with the end of the name,
    or alone."""
    across = Words(x=0, y=0, text="", size=10, anchor="middle")
    name = f"{index} {name}" if name != index else index
    names = [f"{name} ({part})", name, f"{index} {part}"] if part else [name]
    for text in names:
        if text_width(text, 10) <= width:
            return replace(across, text=text)
    for text in names[-2:]:
        if width >= 12 and text_width(text, 9) <= height - 4:
            return replace(across, text=text, size=9, upright=True)
    if short := fitting(name.removeprefix(f"{index} "), width - text_width(f"{index} ", 10), 10, least=8):
        return replace(across, text=f"{index} {short}")
    if text_width(index, 10) <= width:
        return replace(across, text=index)
    return replace(across, text=index, size=9, upright=True) if width >= 10 and text_width(index, 9) <= height - 4 else None


def _ghost(canvas: Canvas, scene: Scene, equal: Scene, scale: Scale) -> None:
    """The equal split, thin and grey, at the same scale."""
    top, y = canvas.groups[0], canvas.height + 16
    text = f"{equal_split_text(equal)} (as many on each device), at the same scale"
    text = text[0].upper() + text[1:]
    if equal.seconds is not None and scene.seconds:
        text += f": {human_seconds(equal.seconds)} a step; dark is what a device computes in it"
    for line in wrapped(text, (canvas.width - 2 * MARGIN) / 1.1, 11.5):
        top.words.append(Words(x=MARGIN, y=y, text=line, size=11.5, bold=True, colour="faint", clear=True))
        y += 15
    rows = equal.stages[:_MOST_GHOSTS]
    for lane, stage in rows:
        group = canvas.group(f"equal split: {stage_sentence(equal, lane, stage)}")
        end, right = scale.x(stage.busy), scale.x(equal.seconds or 0.0)
        group.boxes.append(Box(x=scale.left, y=y, width=end - scale.left, height=_GHOST, fill="faint", opacity=0.35))
        group.boxes.append(Box(x=end, y=y, width=max(0.0, right - end), height=_GHOST, fill="panel", edge="rule", thickness=0.5))
        name = f"{devices_text(lane, stage)} · {layer_range(stage.layers)}: {human_seconds(stage.busy)}"
        shown = fitting(name, scale.room - 8, 9.5)
        group.words.append(Words(x=scale.left + 4, y=y + _GHOST / 2, text=shown, size=9.5))
        y += _GHOST + 3
    group = canvas.group()
    draw_marks(group, scene, scale, y - (_GHOST + 3) * len(rows), y)
    if equal.seconds is not None and rows:
        x = scale.x(equal.seconds)
        group.lines.append(Stroke(points=((x, y - (_GHOST + 3) * len(rows)), (x, y)), thickness=1.4))
    canvas.height = y
