"""In which order a stage begins its computations and its transfers (`Step`, by the names of torch.distributed.pipelining).

*Early*: what may come is posted as soon as there is room for it, and what leaves is sent at once. So a stage has as many receive
buffers as micro-batches are in flight, not as the step has, and the next message moves while this one is computed. Nobody waits
for ever where transfers that were begun go on beside each other, as those of gloo do.

*Agreed*: the transfers of NCCL are kernels, and CUDA does not promise that two kernels run beside each other, whatever their
streams. So all stages begin all that they do in one order: none waits for what another begins later, and the step ends even if
every device runs one thing after the other. The order is that of time, if a forward takes 1 s, a backward 2 s, and a message
none: it has the time at which its sender made it, or a little after its receiver made room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hetpipe.documents.schedule import FORWARD_ONLY, stage_actions

Computation = Literal["F", "B"]
Kind = Literal["F", "B", "RECV_F", "RECV_B", "SEND_F", "SEND_B"]
_COMES: dict[Computation, Kind] = {"F": "RECV_F", "B": "RECV_B"}  # what it needs
_LEAVES: dict[Computation, Kind] = {"F": "SEND_F", "B": "SEND_B"}  # what it makes
Depths = Sequence[int | None]  # of the warm-up of each stage; None where it only runs forward
_Place = tuple[float, int, int, int]  # the time; forwards before their messages, then backwards, then theirs; stage, micro-batch


class Step(NamedTuple):
    """Compute a micro-batch (F, B), or begin a transfer of it: its input comes (RECV_F), its gradient comes (RECV_B), its output
    leaves (SEND_F), its gradient leaves (SEND_B)."""

    kind: Kind
    microbatch: int


def early(depths: Depths, stage: int, m: int) -> list[Step]:
    """The order of one of the stages of these `depths` for `m` micro-batches. Only a stage with a backward gets gradients."""
    depth, stages = depths[stage], len(depths)
    forward_only: list[Computation] = ["F"] * m
    actions = forward_only if depth is None else [action.kind for action in stage_actions(stage, depth, m)]
    flying = FORWARD_ONLY if depth is None else min(depth, m)
    done, posted, steps = {"F": 0, "B": 0}, {"F": 0, "B": 0}, list[Step]()

    def post(kind: Computation, count: int) -> None:
        while posted[kind] < min(m, count):
            steps.append(Step(_COMES[kind], posted[kind]))
            posted[kind] += 1

    for kind in actions:
        over = done["F" if depth is None else "B"]
        if stage > 0:
            post("F", over + flying + 1)  # as many as are in flight, and one
        if stage < stages - 1 and depth is not None and done["F"] + 1 >= flying:
            post("B", over + 2 + max(0, flying - (m - over)))  # two; when fewer are in flight, the room of the others as well
        steps.append(Step(kind, done[kind]))
        if stage < stages - 1 if kind == "F" else stage > 0 and depths[stage - 1] is not None:
            steps.append(Step(_LEAVES[kind], done[kind]))
        done[kind] += 1
    return steps


def agreed(depths: Depths, m: int) -> list[list[Step]]:
    """The orders of all stages of these `depths`, none of which contradicts another's. No stage posts anything sooner than it
    would `early`, and one that only runs forward waits, as it will, until what it made FORWARD_ONLY micro-batches before has
    left."""
    todo = [deque(early(depths, s, m)) for s in range(len(depths))]
    placed: list[list[tuple[_Place, Step]]] = [[] for _ in todo]
    clock, made, room = [0.0] * len(depths), dict[tuple[int, Step], float](), dict[tuple[int, Step], float]()
    left = dict[tuple[int, int], float]()  # when the output of a stage, of a micro-batch, leaves

    def waits(s: int, step: Step) -> bool:
        """Whether that has no place yet for which this one waits."""
        sender, room_of = (s - 1 if step.kind == "F" else s + 1), step.microbatch - FORWARD_ONLY
        full = depths[s] is None and s < len(depths) - 1 and room_of >= 0 and (s, room_of) not in left
        return full or (0 <= sender < len(depths) and (sender, step) not in made)

    def advance(s: int) -> bool:
        """Place the next step of stage s, unless it waits for one that has no place yet."""
        step = todo[s][0]
        kind, i = step
        if kind in ("RECV_F", "RECV_B"):
            room[s, step] = clock[s] + 0.5 if clock[s] else 0.0
        elif kind in ("F", "B"):
            if waits(s, step):
                return False
            sender, rank, seconds = (s - 1, 0, 1.0) if kind == "F" else (s + 1, 2, 2.0)
            came = 0.0
            if 0 <= sender < len(depths):
                message = Step(_COMES[kind], i)
                came = max(made[sender, step], room[s, message])
                place = (came, rank + 1, s, i)
                placed[s].append((place, message))
                placed[sender].append((place, Step(_LEAVES[kind], i)))
                if kind == "F":
                    left[sender, i] = came
            free = left.get((s, i - FORWARD_ONLY), 0.0) if depths[s] is None else 0.0
            clock[s] = made[s, step] = max(clock[s], came, free) + seconds
            placed[s].append(((clock[s], rank, s, i), step))
        todo[s].popleft()
        return True

    while any(todo):
        for s in range(len(depths)):
            while todo[s] and advance(s):
                pass
    return [[step for _, step in sorted(own)] for own in placed]
