"""`hetpipe what-if` with layers that are split over several cards: bytes beside those of shards that hetpipe makes, seconds by
formula, and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.documents.cluster import Link
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.hf.sizes import CUT
from hetpipe.layers.shards.split import split_layer
from hetpipe.layers.shards.sums import Group
from hetpipe.planning.partition import Problem
from hetpipe.study.rules import plan_with
from hetpipe.whatif.adapters.lora import Lora
from hetpipe.whatif.adapters.profile import Adapted
from hetpipe.whatif.adapters.trained import saved_bytes
from hetpipe.whatif.answer import Question, answer, cheapest_card, profile_of, unsplit
from hetpipe.whatif.cards import known_cards
from hetpipe.whatif.machine import as_cluster
from hetpipe.whatif.models import find_model
from hetpipe.whatif.shards.measurements import whole, widest_first
from hetpipe.whatif.shards.rules import layer_of
from hetpipe.whatif.shards.search import best_plan
from hetpipe.whatif.table import notes, splits
from tests.support.commands import Command
from tests.test_what_if_adapters import kept_storages, layers_of, small

CARDS = known_cards().cards
LINK = Link(bandwidth=12e9, latency=1e-5)
HEADS = {"q_proj": "colwise/8", "k_proj": "colwise/{keys}x{each}", "v_proj": "colwise/{keys}x{each}"}


def question(*machines: tuple[str, ...], **options: Any) -> Question:
    given: dict[str, Any] = {"model": find_model("mistral-7b"), "cards": CARDS, "link": LINK, "seconds": 1.0}
    return Question(machines=machines, **(given | options))


def of_degree(profile: Profile, card: str, precision: str, degree: int) -> Measurement:
    found = [m for m in profile.measurements if (m.device_type, m.precision, m.tensor_parallel) == (card, precision, degree)]
    assert len(found) == 1
    return found[0]


def shard(kind: str, lora: Lora, keys: int, *, half: bool, degree: int) -> tuple[Any, Any]:
    """A layer of transformers with peft's adapters, one of whose shards it is, and its rotary angles."""
    peft = pytest.importorskip("peft")
    layer, rotary = layers_of(kind, num_key_value_heads=keys)
    layer.to(torch.bfloat16 if half else torch.float32)
    peft.inject_adapter_in_model(peft.LoraConfig(r=lora.r, target_modules=list(lora.targets) or list(CUT)), layer)
    for name, parameter in layer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    parents = {name: "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp" for name in CUT}
    heads = {name: style.format(keys=keys, each=8 // keys) for name, style in HEADS.items()}
    layer.tensor_parallel = {f"{parents[name]}.{name}": style for name, style in (CUT | heads).items()}
    if kind == "qwen3":
        layer.tensor_parallel |= {f"self_attn.{name}": "replicated_with_grad_allreduce" for name in ("q_norm", "k_norm")}
    split_layer("layer", layer, Group(range(degree), 0, None))
    return layer, rotary


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ()])
@pytest.mark.parametrize(
    ("kind", "keys", "half", "degree"),
    [("llama", 2, False, 2), ("qwen3", 2, True, 2), ("llama", 1, True, 2), ("llama", 2, False, 4), ("llama", 1, True, 4)],
)
def test_bytes_of_a_shard_are_those_that_hetpipe_makes(
    kind: str, keys: int, half: bool, degree: int, targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters to the number, and what autograd keeps to the byte."""
    monkeypatch.setattr(Group, "add_up", lambda self, tensor: tensor.detach().clone())
    tokens, lora = 96, Lora(r=12, targets=targets)
    layer, rotary = shard(kind, lora, keys, half=half, degree=degree)
    adapted = Adapted.of(small(tmp_path, model_type=kind, num_key_value_heads=keys), lora, "bf16").shard(degree)
    counts = {name: p.numel() for name, p in layer.named_parameters()}
    matrices = sum(count for name, count in counts.items() if "lora_" not in name and "norm" not in name)
    assert sum(matrix.parameters for matrix in adapted.matrices) == matrices
    assert adapted.trained == sum(count for name, count in counts.items() if "lora_" in name)
    own = saved_bytes(adapted.widths, adapted.modules, lora, adapted.targets, tokens, "bf16" if half else "fp32")
    assert own == kept_storages(layer, tokens, 256, rotary, half=half)


class TestSeconds:
    """Of a layer, in the profile."""

    def test_a_shard_takes_its_part_of_the_products_all_norms_and_four_sums(self) -> None:
        """With a link that takes no time nothing but norms and residual sums keeps a shard from half of the whole."""
        machine, tokens, hidden = ("3090", "3090"), 1024, 4096
        slow, fast = (
            profile_of(question(machine, link=link, tokens=tokens))[0]
            for link in (Link(bandwidth=12e9, latency=1e-5), Link(bandwidth=1e18, latency=0.0))
        )
        plain = of_degree(fast, "3090", "bf16", 1)
        parted, summed = (of_degree(profile, "3090", "bf16", 2) for profile in (fast, slow))
        for i, size in enumerate(plain.microbatch_sizes):
            numbers = size * tokens * hidden
            alike = 5 * numbers * 4 / CARDS["3090"].bandwidth
            for name, passes, number_bytes in (("forward", 2, 2), ("backward", 3, 4)):
                own, half, all_sums = (getattr(m, name)[i] for m in (plain, parted, summed))
                assert half[1] == pytest.approx(passes * alike + (own[1] - passes * alike) / 2, rel=1e-6)
                ring = 2 * (numbers * number_bytes / 2 / 12e9 + 1e-5)
                assert all_sums[1] == pytest.approx(half[1] + 2 * ring, rel=1e-6)
                assert all_sums[0] == own[0] == 0, "the embedding"
                assert all_sums[-1] == own[-1], "the head is whole on each card"

    def test_bytes_where_all_of_a_model_trains(self) -> None:
        profile, _ = profile_of(question(("3090",) * 4, tokens=1024))
        model = find_model("mistral-7b").sizes
        for degree in (2, 4):
            own = of_degree(profile, "3090", "bf16", degree)
            matrices = model.layer_parameters - 2 * 4096
            assert own.parameter_bytes is not None
            assert own.parameter_bytes[1] == 4 * (2 * 4096 + matrices // degree)
            assert own.parameter_bytes[0] == 4 * model.embedding_parameters
            assert own.parameter_bytes[-1] == 4 * model.head_parameters
            assert own.saved_bytes_per_sample is not None
            assert own.saved_bytes_per_sample[1] == 1024 * 4096 * (10 + 24 // degree)
            assert profile.at({"3090": "bf16"}).trained_bytes(degree, "3090").tolist() == list(own.parameter_bytes)

    def test_adapters_bytes_are_those_of_the_shard(self) -> None:
        asked = question(("3090", "3090"), lora=Lora(r=16), base="bf16", tokens=1024)
        profile, _ = profile_of(asked)
        own, adapted = of_degree(profile, "3090", "bf16", 2), asked.adapted
        assert adapted is not None
        part = adapted.shard(2)
        assert own.parameter_bytes == tuple(
            base + trained for base, trained in zip(part.bytes_of_base("bf16"), (0, *[4 * part.trained] * 32, 0), strict=True)
        )
        assert own.cast_bytes == (0, *[2 * part.trained] * 32, 0)
        assert adapted.trained / 2 < part.trained < adapted.trained, "of each adapter one matrix is whole"


def test_only_what_hetpipe_can_split_is_weighed() -> None:
    pair = ("3090", "3090")
    lora: dict[str, Any] = {"lora": Lora(r=16)}
    for asked, reason in (
        (question(pair), None),
        (question(pair, base="bf16", **lora), None),
        (question(("3090",), added=(("3090",),)), None),
        (question(("3090", "1080ti"), added=(("t4",),)), "no machine has several cards of one kind"),
        (question(("3090",), ("3090",), network=LINK), "no machine has several cards of one kind"),
        (question(pair, base="nf4", **lora), "what shards of a base in nf4 take is not counted"),
        (question(pair, model=find_model("bert-large")), "how the layers of bert-large are split is known of models with a"),
        (question(pair, model=profile_of(question(pair))[0]), "a shared profile does not say how its layers are split"),
    ):
        told = unsplit(asked)
        assert told == reason if reason is None else (told or "").startswith(reason)
        degrees = {m.tensor_parallel for m in profile_of(asked)[0].measurements}
        assert degrees == ({1, 2} if reason is None else {1})


def test_heads_are_not_parted(tmp_path: Path) -> None:
    """Twelve heads cannot be eight equal parts. Where they share two of keys, each of 4 cards computes one of these; three of
    keys can be cut over no such number."""
    eight = ("3090",) * 8
    for keys, degrees in ((2, {1, 2, 4}), (1, {1, 2, 4}), (3, {1}), (12, {1, 2, 4})):
        model = small(tmp_path, num_attention_heads=12, num_key_value_heads=keys, hidden_size=768, intermediate_size=768)
        profile, _ = profile_of(question(eight, model=model))
        assert {m.tensor_parallel for m in profile.measurements} == degrees
        assert layer_of(model, "as-is").widths.key_heads == keys


class TestPlans:
    """Of whole questions."""

    def test_a_layer_that_no_small_card_holds_is_split_over_four(self, run: Command, tmp_path: Path) -> None:
        file = tmp_path / "profile.json"
        words = ("mistral-7b", "--lora", "r=16", "--base", "bf16", "--gpus", "3090,4x3070", "--length", "16384")
        found = run("what-if", *words, "--global-batch", "8", "--without", "3070", "--json", "-o", file)
        assert found.code == 0, found.err
        told = json.loads(found.out)
        devices = [stage["devices"] for stage in told["rows"][0]["plan"]["replicas"][0]["stages"]]
        assert ["n0/1", "n0/2", "n0/3", "n0/4"] in devices
        assert any("is split over 4 × 3070 (n0/1, n0/2, n0/3, n0/4)" in note for note in told["notes"])
        assert any(note.startswith("Times of split layers are computed and not measured") for note in told["notes"])
        assert {m.tensor_parallel for m in Profile.load(file).measurements} == {1, 2, 4}
        nothing = run("what-if", *words[:-3], "3090,3070", *words[-2:], "--without", "3070", "--global-batch", "8", "--json")
        assert json.loads(nothing.out)["rows"][0]["plan"] is None, "a single one holds no layer"

    def test_where_whole_layers_are_faster_they_stay_whole(self) -> None:
        """Split layers need a communicator more on each card, for which these have no room."""
        box = ("a6000", "a6000", "3090", "3090")
        asked = question(box, model=find_model("llama-3-8b"), without=("3090",), global_batch=64, seconds=8.0)
        cluster = as_cluster(asked.machines, CARDS, LINK, None)
        profile = profile_of(asked)[0].at(dict.fromkeys(box, "bf16"))
        wide, plain = widest_first(profile, cluster)
        alone = plan_with("auto", "", plain, cluster, 64, time_limit_seconds=4.0)
        both = best_plan("", profile, cluster, 64, 8.0)
        assert both.step_seconds <= alone.step_seconds
        assert both.plan is not None
        assert both.plan.predicted is not None
        gap, bound = both.plan.predicted.gap, both.plan.predicted.lower_bound_seconds
        assert bound is not None
        assert gap == pytest.approx(both.step_seconds / bound - 1)
        assert bound <= plan_with("auto", "", wide, cluster, 64, time_limit_seconds=4.0).step_seconds

    def test_two_fast_cards_beside_slow_ones(self) -> None:
        asked = question(
            ("a6000", "a6000", "3090", "3090"),
            model=find_model("qwen3-8b"),
            link=Link(bandwidth=50e9, latency=1e-5),
            global_batch=4,
            without=("3090",),
            seconds=40.0,  # searches end long before
        )
        found = answer(asked)
        row = found.rows[0]
        assert row.plan is not None
        assert any("split over 2 × a6000" in text for text in splits(row))
        kept = whole(found.profile)
        assert {m.tensor_parallel for m in kept.measurements} == {1}
        told = list(notes(answer(question(("3090", "3090"), base="nf4", lora=Lora(r=16), without=("3090",)))))
        assert any(note == "Each layer is whole on one card: what shards of a base in nf4 take is not counted." for note in told)


def test_cards_that_a_machine_lacks_change_nothing_of_what_fits_it() -> None:
    """A card without bf16 gives twice the bytes to the next layer, and is tried before the card that is enough."""
    asked = question(("3070", "3070"), lora=Lora(r=16), base="bf16", tokens=16384, global_batch=1)
    profile, _ = profile_of(replace(asked, added=(("1080ti",), ("4090",))))
    cluster = as_cluster([("3070", "3070", "4090")], CARDS, LINK, None)
    alone, _ = profile_of(replace(asked, added=(("4090",),)))
    precisions: dict[str, Any] = {"3070": "bf16", "4090": "bf16"}
    beside, own = profile.at(precisions | {"1080ti": "fp32"}), alone.at(precisions)
    assert (beside.output_bytes > own.output_bytes).any()
    for one, other in zip(widest_first(beside, cluster), widest_first(own, cluster), strict=True):
        problems = [Problem.of(profile, cluster, 1, PlanOptions()) for profile in (one, other)]
        assert problems[0].profile.model_dump()["measurements"] == problems[1].profile.model_dump()["measurements"]
        assert (problems[0].profile.output_bytes == problems[1].profile.output_bytes).all()
    assert cheapest_card(asked) == "3090"
