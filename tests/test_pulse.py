"""Signs of life: who is gone is named, by all others."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.processes import pulse
from hetpipe.processes.peers import beats as peer_beats
from hetpipe.processes.peers.beats import Beat, Silence, gone, read_beats
from hetpipe.processes.progress import Seen
from hetpipe.processes.pulse import PeerLostError, Pulse, peers_named
from hetpipe.processes.whereabouts import describe_with, during, figures_from, on_change, resumes_from
from hetpipe.training.observers.watch import look


class Store:
    """A store in this process; `broken`: as it is when its host cannot be reached. Whoever beats has done so again before it is
    looked at, however busy the machine."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.beating: dict[str, Pulse] = {}
        self.broken = False

    def _reach(self) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._reach()
        if key in self.beating:
            self.beating[key]._beat()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._reach()
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.02)
    yield Store()
    describe_with("")
    figures_from(None)
    resumes_from("")
    on_change(lambda: None)


def beating(store: Store, rank: int, host: str) -> Pulse:
    found = Pulse(store, rank, 3)
    found.host = host
    found.start()
    store.beating[f"beat/{rank}"] = found
    return found


def silence(found: Pulse) -> None:
    """As when its process is killed: nothing more is written."""
    found._over = True
    found._changed.set()
    found._thread.join()


def test_a_rank_that_beats_no_more_is_named_with_what_it_was_doing(store: Store) -> None:
    describe_with("replica 0 stage 1, device n1/0", lambda: "1F3 of step 17")
    one, two, three = (beating(store, rank, host) for rank, host in enumerate(("a", "a", "b")))
    assert one.verdict(0.3) is None
    silence(two)
    text = one.verdict(0.3)
    assert text is not None
    assert text.startswith("rank 1 on host a (replica 0 stage 1, device n1/0) is gone; last heard of at ")
    assert text.endswith(", in 1F3 of step 17")
    assert three.verdict(0.3) == text
    for each in (one, three):
        silence(each)


def test_a_host_all_of_whose_ranks_are_silent_is_named_once() -> None:
    def beat(rank: int, host: str, when: float) -> Beat:
        return Beat(rank=rank, count=1, time=when, host=host, place=f"device n{rank}/0", doing=f"F{rank}")

    beats = {0: beat(0, "a", 5.0), 1: beat(1, "b", 7.0), 2: beat(2, "b", 6.0)}
    clock = time.strftime("%H:%M:%S", time.localtime(7.0))
    assert gone([beats[1], beats[2]], beats) == (
        "host b is gone or cut off, with all of its ranks (rank 1, device n1/0; rank 2, device n2/0); "
        f"last heard of at {clock}, in F1"
    )
    assert gone([beats[2]], beats).startswith("rank 2 on host b (device n2/0) is gone; last heard of at ")


def test_an_error_of_another_rank_comes_before_silence_and_who_ended_well_is_not_missed(store: Store) -> None:
    one, two = (beating(store, rank, "a") for rank in range(2))
    describe_with("device n0/2, which the plan does not use", needed=False)
    three = beating(store, 2, "a")
    three.stop()
    describe_with("")
    assert one.verdict(0.3) is None
    two.stop("ValueError: of its own")
    assert one.verdict(0.3) == "rank 1 on host a failed: ValueError: of its own"
    silence(one)


def test_who_ends_without_an_error_while_it_is_needed_is_named(store: Store) -> None:
    """Its script called sys.exit: all that the others saw was a connection that it closed."""
    one, two = beating(store, 0, "a"), beating(store, 1, "b")
    two.stop()
    assert str(one.verdict(0.3)).startswith("rank 1 on host b has ended without an error (sys.exit in a script?), and ")
    silence(one)


def test_all_tell_what_the_first_told_that_ended_because_of_another(store: Store) -> None:
    one, two = beating(store, 0, "a"), beating(store, 1, "b")
    two.stop(cause="rank 2 on host c is gone")
    assert one.verdict(0.3) == "rank 2 on host c is gone"
    silence(one)


@pytest.mark.parametrize("words", ["Timed out waiting 20000ms for recv operation to complete", "Connection closed by peer"])
def test_after_a_message_that_was_late_the_rank_is_named_that_does_not_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Ranks that share a process say the same of themselves; so rank 1 has said what it does before the others wait."""
    describe_with("replica 0 stage 1", lambda: "between steps")
    with during("fetching samples of step 7"):
        slow = beating(store, 1, "b")
        while not read_beats(store, [1])[1].seconds:  # until it has been seen to
            time.sleep(0.01)
    silence(slow)
    fetches, reads, get = json.loads(store.values["beat/1"]), itertools.count(100), store.get

    def get_living(key: str) -> bytes:
        return json.dumps({**fetches, "count": next(reads)}).encode() if key == "beat/1" else get(key)

    monkeypatch.setattr(store, "get", get_living)
    describe_with("replica 0 stage 0", lambda: "the sum of losses of step 7", lambda: True)
    one = beating(store, 0, "a")
    monkeypatch.setattr(pulse, "_pulse", one)
    monkeypatch.setattr(pulse, "SILENT_SECONDS", 0.1)
    with pytest.raises(RuntimeError) as caught, peers_named():
        raise RuntimeError(f"[gloo/transport/tcp/unbound_buffer.cc:81] {words}")
    silence(one)
    if words.startswith("Timed out"):
        text = r"rank 1 on host b \(replica 0 stage 1\) holds up the others: it has been in fetching samples of step 7 for \d+ s"
        assert re.match(text, str(caught.value))
        assert isinstance(caught.value, PeerLostError)
    else:  # all live, and nobody has given up
        assert str(caught.value).endswith(words)


@pytest.mark.parametrize("error", ["ValueError: of its own", None])
def test_the_last_words_are_not_written_over_by_a_sign_of_life_under_way(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    one, slow, written = beating(store, 0, "a"), threading.Event(), store.set
    silence(one)
    one._over = False
    waits = [slow]

    def set_slowly(key: str, value: str) -> None:
        if waits:
            assert waits.pop().wait(60)
        written(key, value)

    monkeypatch.setattr(store, "set", set_slowly)
    under_way = threading.Thread(target=one._beat)
    under_way.start()
    while waits:
        time.sleep(0.01)
    ending = threading.Thread(target=one.stop, args=(error,))
    ending.start()
    ending.join(0.2)  # time enough to write before
    slow.set()
    for thread in (under_way, ending):
        thread.join()
    last = read_beats(store, [0])[0]
    assert (last.error, last.left) == (error, error is None)


def test_a_store_out_of_reach_is_told_from_both_sides(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "h0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    one = beating(store, 0, "b")
    store.broken = True
    assert one.verdict(0.3) == (
        "the job's store at h0:29500 cannot be reached: the host 'h0' is gone, torchrun has ended there, or this host ('b') is "
        "cut off"
    )
    assert one.first_to_say("the same")
    store.broken = False
    assert one.first_to_say("the same")
    assert not one.first_to_say("the same")
    silence(one)


def test_who_fails_ends_once_others_have_heard_why_and_they_know_it_without_the_store(store: Store) -> None:
    """The agent of the host that keeps the store ends with the rank that fails: then others asked for words that were gone."""
    one, two = beating(store, 0, "a"), beating(store, 1, "b")
    one.elsewhere = [1]
    one.stop("ValueError: of its own")
    store.broken = True
    assert two.verdict(0.3) == "rank 0 on host a failed: ValueError: of its own"
    silence(two)


def test_who_is_gone_elsewhere_is_waited_for_no_longer_than_a_living_rank_would_need(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "HEARD_SECONDS", 0.2)
    one, two, three = beating(store, 0, "a"), beating(store, 1, "b"), beating(store, 2, "c")
    one.elsewhere = [1, 2]
    two.stop()
    silence(three)
    one.stop(cause="rank 2 on host c is gone")
    assert read_beats(store, [0])[0].cause == "rank 2 on host c is gone"


def test_a_store_that_does_not_answer_is_out_of_reach(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "STORE_SECONDS", 0.1)
    one, stuck = beating(store, 0, "b"), threading.Event()
    silence(one)
    monkeypatch.setattr(store, "check", lambda _: stuck.wait() and False)
    assert "cannot be reached" in str(one.verdict(0.3))
    stuck.set()


def test_who_is_silent_for_too_long_is_noticed_without_a_failure(store: Store) -> None:
    one, two = Pulse(store, 0, 3, patience=0.2), beating(store, 1, "b")  # which looks when it is told to
    one._silence = Silence(0.2, 0.0)
    assert one._lost() is None
    silence(two)
    assert one._lost() is None
    one._silence.every = 0.15
    time.sleep(0.3)
    assert str(one._lost()).startswith("rank 1 on host b is gone")


def test_silence_counts_only_while_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped, as a scheduler stops those of a job, finds the others as they were when it stopped."""
    clock = [100.0]
    monkeypatch.setattr(peer_beats, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = Silence(10.0, 2.0)
    beats = {rank: Beat(rank=rank, count=1, time=0.0, host="a", place="", doing="") for rank in (0, 1, 2)}

    def after(seconds: float, **heard: int) -> list[int]:
        clock[0] += seconds
        for name, count in heard.items():
            beats[int(name[1:])] = replace(beats[int(name[1:])], count=count)
        return [beat.rank for beat in watch.look(lambda: beats)]

    beats[2] = replace(beats[2], left=True)  # it ended well
    assert after(2.0) == []
    assert after(4.0, r0=2) == []  # rank 1 is silent for 4 s
    assert after(1.0, r0=3) == []
    assert after(3600.0, r0=3) == []  # this process stood still: 8 s for rank 1, 4 for rank 0
    assert after(2.0, r0=4) == []
    assert after(2.0, r0=5) == [1]
    assert after(2.0) == [1]
    assert [after(4.0), after(4.0), after(4.0)] == [[1], [1], [1, 0]]
    assert after(2.0, r0=6, r1=2) == []


def test_the_place_and_what_a_run_resumes_from_are_written_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 600.0)
    one = beating(store, 0, "a")
    describe_with("device n0/0")
    resumes_from("step 3, folder")
    deadline = time.monotonic() + 60
    while (beat := read_beats(store, [0])[0]).resume == "" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (beat.place, beat.resume) == ("device n0/0", "step 3, folder")
    silence(one)


def test_a_broken_connection_is_told_as_the_loss_of_a_rank(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SILENT_SECONDS", 0.3)
    one, two = beating(store, 0, "a"), beating(store, 1, "b")
    monkeypatch.setattr(pulse, "_pulse", one)
    two.stop(cause="rank 1 on host b is gone")
    with pytest.raises(PeerLostError, match="^rank 1 on host b is gone$"), peers_named():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:3456")
    with pytest.raises(RuntimeError, match="^of another kind$"), peers_named():
        raise RuntimeError("of another kind")
    with pytest.raises(PeerLostError, match="^named before: Connection closed by peer$"), peers_named():
        raise PeerLostError("named before: Connection closed by peer")
    silence(one)


def test_how_devices_fare_comes_with_the_signs_of_life(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {"slow": {"memory": "2 GiB"}, "fast": {"memory": "4 GiB"}},
            "nodes": [{"name": "a", "devices": {"slow": 1, "fast": 1}}],
        },
        "test",
    )
    stages = [{"layers": [0, 3], "devices": ["a/1"]}, {"layers": [3, 4], "devices": ["a/0"]}]
    plan = Plan.parse({"model": "m", "global_batch": 4, "replicas": [{"microbatch_sizes": [4], "stages": stages}]}, "test")
    assert [(s.device, s.busy, s.peak_bytes) for s in look(plan, cluster)] == [("a/1 fast", None, None), ("a/0 slow", None, None)]
    describe_with("replica 0 stage 0, device a/1", lambda: "0F1 of step 3")
    figures_from(lambda: {"a/1": (0.75, 1000)})
    pulses = [beating(store, 0, "a")]
    monkeypatch.setattr(pulse, "_pulse", pulses[0])
    assert look(plan, cluster) == [
        Seen("a/1 fast", "r0 s0", "0–2", "0F1 of step 3", 0.75, 1000, 4 * 2**30),
        Seen("a/0 slow", "r0 s1", "3", "", None, None, 2 * 2**30),
    ]
    store.broken = True
    assert look(plan, cluster)[0].busy is None
    store.broken = False
    pulses[0].stop()
