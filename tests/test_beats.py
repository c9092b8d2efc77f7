"""What signs of life say of why a run ends: the rank that is to blame, not one that waits for it."""

from __future__ import annotations

import time
from typing import Any

from hetpipe.processes.peers.beats import Beat, at_work, ended_early, gone, held_up, newest_resume, said

WAITS = {"doing": "the sum of losses of step 7", "waits": True, "seconds": 118.0}
LOADS = {"doing": "fetching samples of step 7", "seconds": 121.0}
CLOCK = time.strftime("%H:%M:%S", time.localtime(5.0))


def beats(*rows: dict[str, Any]) -> dict[int, Beat]:
    """Rank i on host a, b, …, in replica 0 stage i."""
    common = {"count": 9, "time": 5.0, "doing": "1F3 of step 7"}
    names = {i: {"rank": i, "host": "abcdef"[i], "place": f"replica 0 stage {i}"} for i in range(len(rows))}
    return {i: Beat(**{**common, **names[i], **row}) for i, row in enumerate(rows)}


def test_of_those_that_wait_for_one_that_loads_data_the_latter_is_named() -> None:
    found = beats(WAITS, LOADS, WAITS)
    assert (
        held_up(found, 0)
        == held_up(found, 2)
        == (
            "rank 1 on host b (replica 0 stage 1) holds up the others: it has been in fetching samples of step 7 for 2 min 1 s "
            "(they wait for as long as HETPIPE_TIMEOUT_SECONDS says, and outside of steps HETPIPE_LONG_TIMEOUT_SECONDS)"
        )
    )


def test_who_has_been_at_it_for_longest_is_named_and_nobody_who_ended_or_is_not_needed() -> None:
    """A rank that was told of the late message does not wait any more, nor does one that the plan leaves out."""
    ended, unused = {"seconds": 900.0, "left": True, "cause": ""}, {"seconds": 900.0, "needed": False}
    found = held_up(beats(WAITS, LOADS, {"seconds": 3.0}, ended, unused), 0)
    assert str(found).startswith("rank 1 on host b (replica 0 stage 1) holds up the others: ")


def test_where_all_wait_for_each_other_no_rank_is_blamed() -> None:
    found = beats(WAITS, {**WAITS, "doing": ""}, *[WAITS] * 4)
    assert held_up(beats(WAITS), 0) is None
    assert held_up(found, 0) == (
        "all ranks wait for each other, as where the connection between two hosts is cut: "
        "rank 0 on host a (replica 0 stage 0) in the sum of losses of step 7; "
        "rank 1 on host b (replica 0 stage 1) in a message to all; "
        "rank 2 on host c (replica 0 stage 2) in the sum of losses of step 7; "
        "rank 3 on host d (replica 0 stage 3) in the sum of losses of step 7; 2 more"
    )


def test_all_say_what_the_first_said() -> None:
    """Of two that ended because of another, and one that was then told to stop, the first knew most."""
    told = {"left": True, "cause": "rank 1 holds up the others", "time": 6.0}
    late = {"left": True, "cause": "rank 0 is gone", "time": 7.0}
    stopped = {"error": "stopped by SIGTERM after step 6", "time": 8.0}
    unknown = {"left": True, "cause": "", "time": 1.0}
    assert said(beats(WAITS, LOADS, late, told, stopped, unknown), 0) == "rank 1 holds up the others"
    assert said(beats(WAITS, {"error": "ValueError: no", "time": 5.5}, told), 0) == (
        "rank 1 on host b (replica 0 stage 1) failed in 1F3 of step 7: ValueError: no"
    )
    assert said(beats({"error": "of this rank"}, LOADS, unknown), 0) is None


def test_who_ended_without_an_error_is_named_if_it_is_needed() -> None:
    left = {"left": True, "doing": "what follows the gradients of step 6"}
    assert ended_early(beats(WAITS, left, WAITS), 0) == (
        "rank 1 on host b (replica 0 stage 1) has ended without an error (sys.exit in a script?), and the others still need it; "
        f"last heard of at {CLOCK}, in what follows the gradients of step 6"
    )
    assert ended_early(beats(left, {**left, "needed": False}, {**left, "cause": ""}), 0) is None


def test_who_was_killed_while_it_waited_for_another_is_not_the_only_one_named() -> None:
    """NCCL kills the process whose message is late."""
    found = beats(WAITS, LOADS, WAITS)
    assert gone([found[2]], found) == (
        f"rank 2 on host c (replica 0 stage 2) is gone; last heard of at {CLOCK}, in the sum of losses of step 7, and had waited "
        "for 1 min 58 s: rank 1 on host b (replica 0 stage 1) has been in fetching samples of step 7 for 2 min 1 s"
    )
    just_begun = beats({**WAITS, "seconds": 3.0}, LOADS)
    assert gone([just_begun[0]], just_begun).endswith(", in the sum of losses of step 7")
    assert gone([found[1]], found).endswith(", in fetching samples of step 7")


def test_a_run_goes_on_from_what_the_rank_knows_that_has_saved_most() -> None:
    texts = ("", "step 9, saved/step-00000009", "step 40, saved/step-00000040", "step 9, saved/step-00000009")
    assert newest_resume(beats(*({"resume": text} for text in texts))) == texts[2]
    assert newest_resume({}) == ""


def test_what_others_do_meanwhile() -> None:
    measures = {"doing": "measuring slow: 3 of 20, layer 1 of 4"}
    assert at_work(beats(WAITS, measures, {"doing": ""}, {**measures, "left": True})) == (
        "rank 1 on host b: measuring slow: 3 of 20, layer 1 of 4"
    )
    assert at_work(beats(*[measures] * 6)).endswith("rank 3 on host d: measuring slow: 3 of 20, layer 1 of 4; 2 more")
    assert at_work({}) == ""
