import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.predict.timeline import Span, SpanKind, Timeline
from hetpipe.show.report import plan_rows, plan_table, shorten, text_gantt, ticks, utilisation_table
from hetpipe.show.words import microbatches_text, share_text

ROOT = Path(__file__).resolve().parent.parent

CLUSTER = Cluster.parse(
    {
        "format": "hetpipe.cluster/1",
        "device_types": {"fast": {"memory": "4 GiB"}, "slow": {"memory": "2 GiB"}},
        "nodes": [{"name": "n0", "devices": {"fast": 2, "slow": 1}}],
        "link": {"bandwidth": "1 GB/s"},
    },
    "the cluster",
)

PROFILE = Profile.parse(
    {
        "format": "hetpipe.profile/1",
        "model": "net",
        "optimizer": {"state_bytes_per_parameter_byte": 0},
        "layers": [
            {"name": name, "parameter_bytes": 2**20, "output_bytes_per_sample": 4, "saved_bytes_per_sample": 8}
            for name in ("embed", "body.0", "body.1", "[bold]head")
        ],
        "measurements": [
            {
                "device_type": kind,
                "microbatch_sizes": [1],
                "forward_seconds": [[f] * 4],
                "backward_seconds": [[2 * f] * 4],
                "optimizer_seconds": [0.0] * 4,
            }
            for kind, f in (("fast", 0.001), ("slow", 0.004))
        ],
    },
    "the profile",
)

PREDICTED = {
    "step_seconds": 0.05,
    "pipeline_seconds": 0.04,
    "gradient_sync_seconds": 0.009,
    "optimizer_seconds": 0.001,
    "samples_per_second": 140,
    "price_per_hour": 1.5,
    "price_per_million_samples": 2.976,
    "peak_bytes": {"n0/0": 3 * 2**30, "n0/2": 5 * 2**20},
    "lower_bound_seconds": 0.048,
    "gap": 0.0417,
    "proof": "search-bound",
}


def plan(**changes: object) -> Plan:
    return Plan.parse(
        {
            "format": "hetpipe.plan/1",
            "model": "net",
            "global_batch": 7,
            "partitioner": "chain",
            "replicas": [
                {
                    "microbatch_sizes": [2, 2, 1],
                    "stages": [
                        {"layers": [0, 3], "devices": ["n0/0"]},
                        {"layers": [3, 4], "devices": ["n0/2"], "recompute": True},
                    ],
                },
                {"microbatch_sizes": [1, 1], "stages": [{"layers": [0, 4], "devices": ["n0/1"]}]},
            ],
            **changes,
        },
        "the plan",
    )


def printed(renderable: object, width: int = 140) -> str:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (24 * 2**30, "24.0 GiB"),
        (1000 * 2**20, "1000 MiB"),
        (999.9 * 2**20, "1000 MiB"),
        (2**60, "1024 PiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_human_bytes(size: float, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-9, "3.00 ns"),
        (12.34e-6, "12.3 µs"),
        (0.00123, "1.23 ms"),
        (0.9999, "1.00 s"),
        (45, "45.0 s"),
        (119.6, "2.00 min"),
        (7300, "2.03 h"),
        (-0.5, "-500 ms"),
        (float("inf"), "∞"),
    ],
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("sizes", "text"), [([4] * 9 + [3], "9 × 4 + 3"), ([1], "1 × 1"), ([1, 2, 1, 2, 1], "5 × 1 to 2"), ([5, 4, 4], "5 + 2 × 4")]
)
def test_a_share_is_the_number_of_micro_batches_times_their_size(sizes: list[int], text: str) -> None:
    assert share_text(sizes) == text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([4, 4, 3], "micro-batches of 4, 4 and 3"),
        ([4] * 9 + [3], "9 micro-batches of 4 and one of 3"),
        ([1], "one micro-batch of 1"),
        ([2, 2], "2 micro-batches of 2"),
        ([1, 2, 1, 2, 1], "5 micro-batches of 1 to 2"),
        ([5, 4, 4, 4, 4, 3], "one micro-batch of 5, 4 of 4 and one of 3"),
        ([2, 1], "micro-batches of 2 and 1"),
    ],
)
def test_a_share_in_words(sizes: list[int], text: str) -> None:
    assert microbatches_text(sizes) == text


def test_names_are_shortened_at_their_beginning() -> None:
    assert shorten("model.layers.49.attention", 13) == "…49.attention"
    assert shorten("head", 13) == "head"


def test_ticks_are_round_and_within() -> None:
    assert ticks(1.0, 4) == [0, 0.5, 1.0]
    assert ticks(0.0, 4) == [0.0]
    assert len(ticks(3.4, 7)) == 7


def test_rows_say_all_that_is_known() -> None:
    first, second, third = plan_rows(plan(predicted=PREDICTED), profile=PROFILE, cluster=CLUSTER)
    assert first == {
        "stage": "r0 s0",
        "device": "n0/0 fast",
        "share": "2 × 2 + 1",
        "layers": "0–2",
        "names": "embed … body.1",
        "F": "15.0 ms",
        "B": "30.0 ms",
        "depth": "2",
        "recompute": "",
        "params": "3.00 MiB",
        "memory": "3.00 of 4.00 GiB",
    }
    assert (second["layers"], second["names"]) == ("3", "[bold]head")
    assert (second["F"], second["B"], second["recompute"]) == ("20.0 ms", "60.0 ms", "yes")
    assert (third["stage"], third["share"], third["memory"]) == ("r1 s0", "2 × 1", "4.00 GiB")


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    assert list(plan_rows(plan())[0]) == ["stage", "device", "share", "layers", "depth", "recompute"]
    assert plan_rows(plan(), profile=PROFILE)[0]["params"] == "3.00 MiB"
    assert plan_rows(plan(), cluster=CLUSTER)[1]["device"] == "n0/2 slow"


def test_a_plan_for_another_cluster_is_refused_by_name() -> None:
    nodes = [{"name": "m", "devices": {"fast": 3}}]
    other = Cluster.parse(CLUSTER.model_dump(exclude_none=True) | {"nodes": nodes}, "the cluster")
    with pytest.raises(InputError, match="the cluster has no device 'n0/0'"):
        plan_table(plan(), cluster=other)


def test_the_table_shows_stages_and_the_prediction() -> None:
    text = printed(plan_table(plan(predicted=PREDICTED), profile=PROFILE, cluster=CLUSTER))
    assert text.startswith("net: 7 samples a step, 1f1b, planned by chain\n")
    rows = [line.split() for line in text.splitlines()]
    cells = "r0 s1 n0/2 slow 3 [bold]head 20.0 ms 60.0 ms 1 yes 1.00 MiB 5.00 MiB of 2.00 GiB"
    assert cells.split() in rows
    assert "step         50.0 ms (pipeline 40.0 ms, gradient sync 9.00 ms, optimizer 1.00 ms)" in text
    assert "throughput   140 samples/s" in text
    assert "lower bound  48.0 ms (search-bound: no plan of the class that was searched is below it)" in text
    assert "gap          4.2 %" in text
    assert "price        1.50 per hour, 2.98 per million samples" in text
    assert "F, B: seconds of a step that a device computes forward and backward" in text


def test_a_table_of_80_columns_leaves_out_what_is_least_needed() -> None:
    whole = plan_table(plan(predicted=PREDICTED), profile=PROFILE, cluster=CLUSTER)
    narrow = printed(whole, 80)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    (heading,) = [line.split() for line in narrow.splitlines() if "stage" in line]
    assert heading == ["stage", "device", "share", "layers", "F", "B", "memory"]


def test_replicas_that_are_alike_stand_once() -> None:
    stages = [{"layers": [0, 4], "devices": ["n0/0"]}], [{"layers": [0, 4], "devices": ["n0/1"]}]
    both = plan(global_batch=4, replicas=[{"microbatch_sizes": [1, 1], "stages": own} for own in stages])
    (row,) = plan_rows(both, profile=PROFILE, cluster=CLUSTER)
    assert (row["stage"], row["device"]) == ("2 × r0–1 s0", "n0/0 fast")


def test_a_plan_without_a_prediction_says_so() -> None:
    assert printed(plan_table(plan())).endswith("no prediction in this plan: 'hetpipe simulate' makes one")


def span(
    kind: SpanKind,
    start: float,
    end: float,
    *,
    device: str = "n0/0",
    replica: int = 0,
    stage: int = 0,
    microbatch: int | None = None,
) -> Span:
    return Span(device=device, replica=replica, stage=stage, kind=kind, start=start, end=end, microbatch=microbatch)


def timeline(*spans: Span, step: float) -> Timeline:
    return Timeline(spans=spans, step_seconds=step, pipeline_seconds=step, sync_seconds=0.0, optimizer_seconds=0.0)


TWO_STAGES = timeline(
    span("F", 0, 2, microbatch=10),
    span("F", 2, 3, microbatch=11),
    span("B", 7, 9, microbatch=10),
    span("sync", 9, 11),
    span("optimizer", 11, 12),
    span("F", 3, 4, device="n0/2", stage=1, microbatch=10),
    span("B", 4, 7, device="n0/2", stage=1, microbatch=10),
    span("optimizer", 11, 11.2, device="n0/2", stage=1),
    span("F", 0, 12, device="n0/1", replica=1, microbatch=0),
    step=12,
)


def test_a_gantt_drawn() -> None:
    assert printed(text_gantt(TWO_STAGES, width=12)).splitlines()[:4] == [
        "r0 s0 n0/0 F01····B0sso",
        "   s1 n0/2 ···0B00····o",
        "r1 s0 n0/1 F00000000000",
        "           |0 s",
    ]


def test_a_gantt_has_a_time_axis_and_a_legend() -> None:
    lines = printed(text_gantt(TWO_STAGES, width=48)).splitlines()
    assert lines[3] == "           |0 s                |5.00 s             |10.0 s"
    assert lines[4] == "           F forward  B backward  s sync  o optimizer  · idle"


def test_a_gantt_is_as_wide_as_the_terminal() -> None:
    lines = printed(text_gantt(TWO_STAGES), width=60).splitlines()
    assert len(lines[2]) == 60


def test_short_optimizers_show_and_zero_lengths_do_not() -> None:
    short = timeline(span("F", 0, 10, microbatch=0), span("optimizer", 9.99, 10), step=10)
    assert printed(text_gantt(short, width=5)).splitlines()[0] == "r0 s0 n0/0 F000o"
    nothing = timeline(span("F", 0, 0, microbatch=0), span("optimizer", 0, 0), step=0)
    assert printed(text_gantt(nothing, width=5)).splitlines()[:2] == ["r0 s0 n0/0 ·····", "           |0 s"]
    assert "idle" in printed(text_gantt(timeline(step=0.0), width=5))


def test_a_gantt_needs_a_column() -> None:
    with pytest.raises(ValueError, match="width must be at least 1 column, got 0"):
        text_gantt(TWO_STAGES, width=0)


def test_utilisation_of_predicted_and_measured() -> None:
    forward = span("F", 0, 1, microbatch=0)
    measured = timeline(forward, span("B", 1, 3, microbatch=0), span("sync", 3, 4), step=4)
    predicted = timeline(forward, span("B", 1, 2, microbatch=0), step=2)
    text = printed(utilisation_table(predicted, measured))
    rows = [line.split() for line in text.splitlines()]
    assert [" ".join(row) for row in rows if "%" in row][:2] == [
        "r0 s0 n0/0 measured 75.0 % 25.0 % 1.00 s 2.00 s 0 s",
        "predicted 100.0 % 0.0 % 1.00 s 1.00 s 0 s",
    ]
    assert " ".join(text.split()).endswith("of one step, the last that was measured (4.00 s), and of the predicted one (2.00 s)")


def test_utilisation_without_a_prediction() -> None:
    text = printed(utilisation_table(None, timeline(span("sync", 0, 0), step=0.0)))
    assert "r0 s0 n0/0   measured   0.0 %   100.0 %" in text
    assert "predicted" not in text


def test_no_torch_is_needed() -> None:
    code = "import sys, hetpipe.show.report, hetpipe.show.draw; print(*{'torch', 'matplotlib', 'resvg_py'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == ""
