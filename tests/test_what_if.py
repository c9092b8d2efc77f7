"""`hetpipe what-if`: rows, words, JSON, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.what_if.ship import published
from bench.what_if.zorse_plan import priced
from hetpipe.documents.cluster import Link
from hetpipe.documents.clusters.assumed import with_assumed
from hetpipe.files.messages import InputError
from hetpipe.predict.simulator import simulate
from hetpipe.whatif.answer import Answer, Question, answer
from hetpipe.whatif.cards import known_cards
from hetpipe.whatif.models import find_model
from hetpipe.whatif.shipped import shipped_layers
from hetpipe.whatif.table import peaks_text
from tests.support.commands import Command
from tests.support.external import external
from tests.support.strategies import UNHURRIED

ZORSE, NEEDS_ZORSE = external("zorse")
CARDS = known_cards().cards
QUICK = ("--time-limit", "0.5", "--global-batch", "8")


def ask(*machines: tuple[str, ...], **options: Any) -> Answer:
    given: dict[str, Any] = {"model": find_model("bert-large"), "link": Link(bandwidth=12e9), "global_batch": 8, "seconds": 0.5}
    return answer(Question(machines=machines, cards=CARDS, **(given | options)))


def seconds(found: Answer) -> dict[str, float]:
    return {row.name: row.found.step_seconds for row in found.rows}


@pytest.mark.thorough
@settings(**UNHURRIED, max_examples=15)
@given(
    st.lists(st.sampled_from(["a6000", "p40", "t4", "1080ti"]), min_size=1, max_size=3),
    st.sampled_from(["l4", "t4", "2080"]),
    st.sampled_from(["bert-large", "llama-3b"]),
    st.sampled_from([1e8, 12e9]),
)
def test_more_cards_are_never_slower(cards: list[str], more: str, model: str, bandwidth: float) -> None:
    options: dict[str, Any] = {"model": find_model(model), "link": Link(bandwidth=bandwidth), "added": ((more,),), "seconds": 0.3}
    found = ask(tuple(cards), without=(cards[0],) if len(cards) > 1 else (), **options)
    times = seconds(found)
    assert times[f"with one more {more}"] <= times["as it is"]
    assert times["as it is"] <= times.get(f"without one {cards[0]}", float("inf"))
    for row in found.rows:  # the plan is one of these cards, and within their memory
        if row.plan is not None:
            assert row.plan.predicted is not None
            row.plan.check(cluster=row.cluster)
            assert set(row.plan.predicted.peak_bytes) == set(row.plan.device_ids)
            assert all(peak <= row.cluster.type_of(d).memory for d, peak in row.plan.predicted.peak_bytes.items())


def test_a_row_is_what_the_simulator_says() -> None:
    found = ask(("a6000", "p40"), added=(("t4",),))
    for row in found.rows:
        assert row.plan is not None
        again = simulate(row.plan, found.profile, with_assumed(row.cluster, found.profile))
        assert again.step_seconds == pytest.approx(row.found.step_seconds)


def test_a_card_that_only_slows_down_is_left_out() -> None:
    found = ask(("a6000",), added=(("p40",),), link=Link(bandwidth=1e3))
    alone, more = found.rows
    assert more.plan is not None
    assert more.found.step_seconds == alone.found.step_seconds
    assert more.plan.device_ids == ("n0/0",)
    assert peaks_text(more, found).splitlines()[1:] == ["p40 unused"]


class TestPrecisions:
    """Each card's own, and one for all."""

    def test_a_mixed_box_beside_each_single_precision(self) -> None:
        found = ask(("v100-16", "3090", "p40"), model=find_model("llama-tiny"), global_batch=64, seconds=30.0)
        (row,) = found.rows
        assert found.precisions == row.precisions == {"v100-16": "fp16", "3090": "bf16", "p40": "fp32"}
        cards = tuple(row.precisions)
        assert {one.name: dict(one.precisions) for one in found.beside} == {
            "fp32 for all": dict.fromkeys(cards, "fp32"),
            "fp16 for all": dict.fromkeys(cards, "fp16"),
            "bf16, else fp32": {"v100-16": "fp32", "3090": "bf16", "p40": "fp32"},
        }
        for one in (row, *found.beside):
            assert one.plan is not None
            assert one.plan.precision == {kind: one.precisions[kind] for kind in one.plan.precision or ()}
            again = simulate(one.plan, found.profile, with_assumed(one.cluster, found.profile))
            assert again.step_seconds == pytest.approx(one.found.step_seconds)
            assert row.found.step_seconds <= one.found.step_seconds
        step = {one.name: one.found.step_seconds for one in found.beside}
        assert 2 * row.found.step_seconds < step["fp32 for all"]
        assert 1.2 * row.found.step_seconds < step["bf16, else fp32"]

    def test_where_all_cards_are_alike_each_single_precision_is_shown_too(self) -> None:
        found = ask(("3090",))
        fp32, fp16, bf16 = found.beside
        assert (fp32.name, fp16.name, bf16.name) == ("fp32 for all", "fp16 for all", "bf16 for all")
        assert fp16.found.step_seconds == bf16.found.step_seconds == found.rows[0].found.step_seconds < fp32.found.step_seconds
        assert fp16.plan is not None
        assert fp16.plan.precision == {"3090": "fp16"}
        assert ask(("3090",), precision="fp32").beside == ()

    def test_one_file_for_every_precision(self, run: Command, tmp_path: Path) -> None:
        asked = ("--gpus", "v100,3090,p40", "--without", "p40", "-o", tmp_path / "profile.json")
        told = json.loads(run("what-if", "bert-large", *asked, "--precision", "RTX 3090=fp32", "--json", *QUICK).out)
        assert (told["precision"], told["single_precisions"]) == ({"3090": "fp32"}, [])
        assert (told["cards"]["3090"]["precision"], told["cards"]["v100-16"]["precision"]) == ("fp32", "fp16")
        assert list(told["cards"]["3090"]["precisions"]) == ["fp32", "fp16", "bf16"]
        cluster = {
            "format": "hetpipe.cluster/1",
            "device_types": {card: {"memory": CARDS[card].memory} for card in told["cards"]},
            "nodes": [{"name": "box", "devices": dict.fromkeys(told["cards"], 1), "link": {"bandwidth": "12 GB/s"}}],
        }
        (tmp_path / "cluster.json").write_text(json.dumps(cluster))
        files = ("--profile", tmp_path / "profile.json", "--cluster", tmp_path / "cluster.json", "--global-batch", "8")
        for precision in ("auto", "fp16", "v100-16=fp32,3090=bf16,p40=fp16"):
            planned = run("plan", *files, "--precision", precision, "--partitioner", "even", "--json")
            assert planned.code == 0, planned.err
            own = json.loads(planned.out)["precision"]
            assert own["3090"] == ("fp16" if precision == "fp16" else "bf16")

    @pytest.mark.parametrize(
        ("precision", "message"),
        [
            ("bf16", "v100-16 (volta) cannot compute in bf16, but in fp32 and fp16; p40 (pascal) cannot compute in bf16, but"),
            ("bf16", "auto, or what these can compute in: --precision v100-16=fp16,p40=fp16,mine=fp16"),
            ("P40=bf16", "p40 (pascal) cannot compute in bf16"),
            ("mine=bf16", "mine (taken to have no bf16, as its file of cards says no architecture) cannot compute in bf16"),
            ("fp8", "precision is fp32, fp16 or bf16, for all or for each device type by its name, or auto, got 'fp8'"),
            ("t4=fp16", "--precision t4=fp16: no machine has a t4. The cards are v100-16, 3090, p40, mine"),
            ("3091=fp16", "unknown card '3091'; did you mean '3090'?"),
            ("v100=fp16,v100-16=fp32", "two of these names mean the same card"),
        ],
    )
    def test_what_a_card_cannot_compute_in_is_refused(self, run: Command, tmp_path: Path, precision: str, message: str) -> None:
        sheet = {"memory": 8 * 2**30, "bandwidth": 288e9, "fp32": 2.2e13, "fp16": 4.4e13, "source": "a page"}
        (tmp_path / "cards.yaml").write_text(json.dumps({"format": "hetpipe.cards/1", "cards": {"mine": sheet}}))
        asked = ("bert-base", "--gpus", "v100,3090,p40", "--add", "mine", "--cards", tmp_path / "cards.yaml")
        found = run("what-if", *asked, "--precision", precision)
        assert found.code == 2
        assert message in found.err


class TestCommand:
    """In this process."""

    @pytest.mark.thorough
    def test_the_example_cluster_of_zorse(self, run: Command) -> None:
        found = run("what-if", "llama-7b", "--gpus", "a6000,p40,l4,l4", "--json")
        assert found.code == 0
        told = json.loads(found.out)
        first, *others = told["rows"]
        assert (told["tokens_per_sample"], told["precision"]) == (512, "auto")
        measured = {name: card["measured"] for name, card in told["cards"].items()}
        assert measured == {"a6000": True, "p40": True, "l4": True, "3060": False}
        assert told["cheapest_card"] == "3060", "the least of all prices, and what it adds is enough"
        assert first["name"] == "as it is"
        assert first["plan"] is None
        assert "666 MiB are missing on each 'l4'" in first["reason"]
        assert "give each 'l4' 667 MiB more memory" in first["reason"], "rounded up, as it is to be enough"
        assert [row["name"] for row in others] == [f"with one more {card}" for card in ("a6000", "p40", "l4", "3060")]
        assert [row["price"] for row in others] == [None, None, None, 329]
        for row in others:
            assert row["tokens_per_second"] == pytest.approx(64 * 512 / row["step_seconds"])
            assert row["gap"] >= 0
            own = {"3060": "bf16"} if row["added"] == ["3060"] else {}
            assert row["precision"] == row["plan"]["precision"] == {"a6000": "bf16", "p40": "fp32", "l4": "bf16", **own}
        assert [one["name"] for one in told["single_precisions"]] == ["fp32 for all", "fp16 for all", "bf16, else fp32"]

    def test_a_precision_that_is_slower_and_fits(self, run: Command) -> None:
        found = run("what-if", "llama-3b", "--gpus", "3xp40", "--tokens", "4096", "--json", *QUICK)
        assert found.code == 0
        told = json.loads(found.out)
        assert told["cards"]["p40"]["precision"] == "fp32"
        own, more = told["rows"]
        assert own["precision"] == own["plan"]["precision"] == {"p40": "fp16"}
        assert more["precision"] == more["plan"]["precision"] == {"p40": "fp32"}
        assert "as it is: fits with p40 in fp16, which takes less memory, and not at what is fastest" in told["notes"]

    def test_the_table_says_what_is_measured(self, run: Command) -> None:
        found = run("what-if", "bert-large", "--gpus", "t4,1080ti", "--add", "5060ti", "--price", "5060ti=400", *QUICK)
        assert found.code == 0
        assert re.search(r"^ *t4 +15.0 GiB +fp16 +measured *$", found.out, re.M)
        assert re.search(r"1080ti +11.0 GiB +fp16 +scaled from p40 by data sheets \(bert-large, 512 tokens, fp16\)", found.out)
        assert re.search(r"5060ti +16.0 GiB +bf16 +scaled from", found.out)
        assert re.search(r"with one more 5060ti .*\+400", found.out)
        assert "Scaled times (1080ti, 5060ti)" in found.out
        assert "Nobody measured bf16 on 5060ti: it is taken to be as fast as fp16, which has the same rate there." in found.out

    def test_machines_and_cards_to_leave_out(self, run: Command) -> None:
        given = ("--gpus", "RTX 3090", "--gpus", "2xt4", "--network", "10 Gbit/s", "--without", "t4", "--without", "3090")
        found = run("what-if", "bert-large", *given, "--json", *QUICK)
        assert found.code == 0, found.err
        rows = json.loads(found.out)["rows"]
        assert [(row["name"], row["machines"]) for row in rows] == [
            ("as it is", [["3090"], ["t4", "t4"]]),
            ("without one t4", [["3090"], ["t4"]]),
            ("without one 3090", [["t4", "t4"]]),
        ]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("bert-large", "--gpus", "3091"), "unknown card '3091'; did you mean '3090'? known: 1080ti, p40,"),
            (("llama-8b", "--gpus", "t4"), "unknown model 'llama-8b'; did you mean 'llama-3-8b'? known: gpt-1.3b"),
            (
                ("bert-large", "--gpus", "t4", "--gpus", "t4"),
                "2 machines were given, but no network between them. Give its bandwidth",
            ),
            (("bert-large", "--gpus", "t4,"), "cannot read the cards 't4,'"),
            (("bert-large", "--gpus", "t4", "--link", "fast"), "--link: bandwidth: cannot read 'fast'"),
            (("bert-large", "--gpus", "t4", "--without", "l4"), "--without l4: no machine has a l4. The cards are t4"),
            (("bert-large", "--gpus", "t4", "--without", "t4"), "the machine has no other card than its t4"),
            (("bert-large", "--gpus", "t4", "--price", "t4=cheap"), "--price 't4=cheap': write a card and a number"),
            (("bert-large", "--gpus", "t4", "--price", "t4=nan"), "a price is from 0 to a billion"),
        ],
    )
    def test_what_is_refused(self, run: Command, arguments: tuple[str, ...], message: str) -> None:
        found = run("what-if", *arguments)
        assert found.code == 2
        assert message in found.err

    def test_nothing_fits(self, run: Command) -> None:
        found = run("what-if", "llama-65b", "--gpus", "t4", *QUICK)
        assert found.code == 3
        assert "does not fit" in found.out
        assert "the model fits none of these machines" in found.err

    def test_cards_of_ones_own(self, run: Command, tmp_path: Path) -> None:
        file = tmp_path / "cards.yaml"
        sheet = {"memory": 8 * 2**30, "bandwidth": 288e9, "fp32": 2.2e13, "fp16": 4.4e13, "source": "a page"}
        file.write_text(json.dumps({"format": "hetpipe.cards/1", "cards": {"mine": sheet}}))
        found = run("what-if", "bert-base", "--gpus", "mine", "--without", "t4", "--cards", file, *QUICK)
        assert (found.code, "--without t4: no machine has a t4. The cards are mine" in found.err) == (2, True)
        found = run("what-if", "bert-base", "--gpus", "t4", "--add", "mine", "--cards", file, "--json", *QUICK)
        assert json.loads(found.out)["cards"]["mine"]["source"] == "a page"


@NEEDS_ZORSE
def test_what_is_shipped_is_made_of_the_published_files() -> None:
    assert published(ZORSE) == shipped_layers()
    shipped = Path(__file__).resolve().parent.parent / "hetpipe" / "whatif" / "zorse-LICENSE.txt"
    assert shipped.read_text() == (ZORSE / "LICENSE").read_text()


@NEEDS_ZORSE
def test_the_published_plan_is_priced() -> None:
    profile, cluster, said, (theirs, ours) = priced(ZORSE)
    assert said == pytest.approx(7.721375)
    shares = {stage.device: replica.samples for replica in theirs.plan.replicas for stage in replica.stages}
    assert {(cluster.device(d).type, n) for d, n in shares.items()} == {("l4", 36), ("p40", 2), ("a6000", 56), ("l4", 34)}
    assert all(stage.layers == (0, 24) for replica in theirs.plan.replicas for stage in replica.stages)
    busiest = max(  # no replica is faster than its micro-batches one after the other
        len(replica.microbatch_sizes) * float(sum(map(sum, profile.measurement(kind).times(2))))
        for replica in theirs.plan.replicas
        for kind in [cluster.device(replica.stages[0].device).type]
    )
    assert theirs.step_seconds >= busiest
    assert ours.plan.global_batch == theirs.plan.global_batch == 128
    assert ours.step_seconds < theirs.step_seconds
    assert all(peak <= cluster.type_of(device).memory for device, peak in ours.peak_bytes.items())


def test_unknown_cards_are_listed_whole() -> None:
    with pytest.raises(InputError) as error:
        known_cards().find("voodoo")
    assert all(card in str(error.value) for card in CARDS)


# ---- models of transformers by type, folder, file and name ----


def counted(kind: str) -> tuple[int, int]:
    """Parameters of one layer, and of all, as transformers builds the type by default."""
    import torch
    import transformers

    config: Any = transformers.CONFIG_MAPPING[kind]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config())
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    return sum(p.numel() for p in layers[0].parameters()), sum(p.numel() for p in {*model.parameters()})


@pytest.mark.parametrize(
    ("kind", "family"), [("qwen3", "llama"), ("glm", "llama"), ("exaone4", "llama"), ("gpt_neox", "gpt"), ("arcee", "gpt")]
)
def test_a_type_of_transformers_has_the_sizes_that_it_builds(kind: str, family: str) -> None:
    found = find_model(kind)
    layer, whole = counted(kind)
    assert found.family == family
    assert found.source.startswith("the defaults of transformers' ")
    assert found.sizes.layer_parameters == pytest.approx(layer, rel=0.01)
    sizes = found.sizes
    untied = sizes.layers * sizes.layer_parameters + sizes.embedding_parameters + sizes.head_parameters
    assert min(abs(untied - whole), abs(untied - sizes.head_parameters - whole)) < 0.01 * whole  # whose head may be tied


def test_a_file_of_any_dense_decoder_is_priced(tmp_path: Path, run: Command) -> None:
    values = {
        "model_type": "seed_oss",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 1000,
    }
    file = tmp_path / "any.json"
    file.write_text(json.dumps(values))
    found = find_model(str(file))
    assert (found.family, found.vocabulary, found.source) == ("llama", 1000, "its config.json, model type seed_oss")
    assert found.sizes.layer_parameters == 2 * 512 * 64 * 10 + 3 * 512 * 1024 + 2 * 512
    ended = run("what-if", file, "--gpus", "3090", "--json", *QUICK)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("mixtral", {"num_local_experts": 8}, "num_local_experts is 8: which experts a token passes is not known"),
        ("mamba", {"state_size": 16}, "state_size is 16: states in the place of attention were not measured"),
        ("minicpm3", {"kv_lora_rank": 256}, "kv_lora_rank is 256: projections of low rank in attention were not measured"),
        ("bart", {"is_encoder_decoder": True}, "is_encoder_decoder is True: it has an encoder beside the decoder"),
        ("gemma3", {"text_config": {"model_type": "gemma3_text"}}, r"it holds several models \(text_config\)"),
        ("hunyuan_v1_moe", {}, "they have experts"),
        (
            "seed_oss",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types has 'linear_attention', which is priced",
        ),
        ("nonsense", {}, "models of type 'nonsense' are not known. Known: bert, "),
        (["x"], {}, r"models of type \['x'\] are not known. Known: bert, "),
    ],
)
def test_what_is_no_dense_decoder_is_refused_by_name(kind: Any, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 64, **more}))
    with pytest.raises(InputError, match=message) as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_name_with_a_revision_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.hub import FIRST, SECOND, cache_here, put, qwen

    cache = cache_here(tmp_path / "cache", monkeypatch)
    put(cache, "tiny/qwen", FIRST, qwen(tmp_path / "a"), "old")
    put(cache, "tiny/qwen", SECOND, qwen(tmp_path / "b", num_hidden_layers=5))
    assert [find_model(f"tiny/qwen{more}").sizes.layers for more in ("", "@old", f"@{SECOND}")] == [5, 3, 5]
    with pytest.raises(InputError, match="unknown model 'tiny/qwen@v3'"):
        find_model("tiny/qwen@v3")
