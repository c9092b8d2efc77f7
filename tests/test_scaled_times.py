"""Cards, models and times of what was not measured."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.what_if.run import off, rows
from hetpipe.documents.cluster import Link
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError
from hetpipe.whatif.answer import Question, profile_of
from hetpipe.whatif.cards import Card, Cards, known_cards, simplified
from hetpipe.whatif.estimate import all_measured, estimate, scaled
from hetpipe.whatif.models import find_model, listed_models, measured_model
from hetpipe.whatif.order import Timed, in_order, outdoes
from hetpipe.whatif.shared import share_profile, with_cards, without_private
from hetpipe.whatif.table import TYPICAL, WORST
from tests.support.strategies import make_profile

CARDS = known_cards().cards
MEASURED = list(all_measured())


@given(st.sampled_from(MEASURED))
def test_a_card_scaled_from_itself_is_the_card(m: Any) -> None:
    card = CARDS[m.card]
    assert scaled(m, m.sizes, m.tokens, m.precision, card, card) == m.cell
    found = estimate(measured_model(m.model), m.tokens, m.precision, m.card, CARDS)
    assert (found.measured, found.cell) == (True, m.cell)


@given(st.sampled_from(MEASURED), st.floats(0.1, 10))
def test_a_card_of_twice_the_rates_takes_half_the_time(m: Any, factor: float) -> None:
    card = CARDS[m.card]
    rates = {name: factor * getattr(card, name) for name in ("bandwidth", "fp32", "fp16")}
    found = scaled(m, m.sizes, m.tokens, m.precision, card.model_copy(update=rates), card)
    assert found.forward == pytest.approx([t / factor for t in m.cell.forward])
    assert found.backward == pytest.approx([t / factor for t in m.cell.backward])


@given(st.sampled_from(MEASURED), st.sampled_from(["bandwidth", "fp32", "fp16"]), st.floats(1, 10))
def test_a_better_card_is_no_slower(m: Any, rate: str, factor: float) -> None:
    card = CARDS[m.card]
    better = card.model_copy(update={rate: factor * getattr(card, rate)})
    found = scaled(m, m.sizes, m.tokens, m.precision, better, card)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(found.forward, m.cell.forward, strict=True))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", listed_models())
def test_every_model_has_times_on_every_card(name: str, precision: Any) -> None:
    model = find_model(name)
    for card in CARDS:
        found = estimate(model, 512, precision, card, CARDS)
        assert (found.source.precision, found.source.family) == (precision, model.family)
        assert found.source.card == card or not found.measured
        assert "w6800" not in {found.source.card} - {card}  # the only one of AMD


def on_all_cards(name: str, precision: Any, **more: Any) -> tuple[dict[str, Measurement], dict[str, str]]:
    """The measurement of each card, and how it came about."""
    question = Question(model=find_model(name), machines=(tuple(CARDS),), cards=CARDS, link=Link(bandwidth=12e9), **more)
    profile, origins = profile_of(question)
    found = {m.device_type: m for m in profile.measurements if m.precision == precision}
    return found, {card: each[precision].text for card, each in origins.items() if precision in each}


@pytest.mark.parametrize("precision", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("name", listed_models())
def test_a_card_with_higher_rates_is_never_slower(name: str, precision: Any) -> None:
    """Of all pairs of cards, at all micro-batch sizes between those of both; two RTX 4090 were predicted slower than two 3090."""
    found, _ = on_all_cards(name, precision)
    assert set(found) == {card for card, sheet in CARDS.items() if precision in sheet.precisions}
    pairs = [(a, b) for a in found for b in found if outdoes(CARDS[a], CARDS[b], precision)]
    assert len(pairs) > 200
    most = max(m.microbatch_sizes[-1] for m in found.values())
    rows = {card: np.array([m.times(b) for b in range(1, most + 1)])[:, :, 1] for card, m in found.items()}  # of a block
    for a, b in pairs:
        assert set(found[a].microbatch_sizes) >= set(found[b].microbatch_sizes)
        both = min(found[a].microbatch_sizes[-1], found[b].microbatch_sizes[-1])
        assert (rows[a][:both] <= rows[b][:both] * (1 + 1e-9)).all(), (a, b)


def test_measured_times_stay_where_measurements_do_not_contradict_each_other() -> None:
    found, told = on_all_cards("llama-7b", "fp16")
    cells = {m.card: m.cell for m in MEASURED if (m.model, m.tokens, m.precision) == ("llama-7b", 512, "fp16")}
    assert {card for card, text in told.items() if text.startswith("measured")} == set(cells)
    assert [card for card in cells if told[card] != "measured"] == ["v100-16"]
    for card, cell in cells.items():
        for row, size in enumerate(cell.sizes):
            forward, backward = (float(t[1]) for t in found[card].times(size))
            if told[card] == "measured":
                assert (forward, backward) == pytest.approx((cell.forward[row], cell.backward[row]), rel=1e-3)
            else:  # one with lower rates was faster
                assert forward <= cell.forward[row]
                assert backward <= cell.backward[row]


def test_bf16_is_as_fast_as_fp16_where_a_card_has_both() -> None:
    """As long as nobody measured it."""
    assert {m.precision for m in MEASURED} == {"fp32", "fp16"}
    (bf16, told), (fp16, as_fp16) = on_all_cards("llama-7b", "bf16"), on_all_cards("llama-7b", "fp16")
    for card, m in bf16.items():
        assert m == fp16[card].model_copy(update={"precision": "bf16"})
        assert told[card] == f"{as_fp16[card]}; in fp16, taken for bf16"


def test_a_change_is_told() -> None:
    _, told = on_all_cards("llama-tiny", "fp16")
    assert told["4090"] == (
        "scaled from a6000 by data sheets (llama-tiny, 512 tokens, fp16); no slower than 3090, whose rates are lower"
    )


@settings(max_examples=60)
@given(st.data())
def test_times_of_any_kind_come_into_order(data: st.DataObject) -> None:
    """Whatever was measured, with unlike sizes; what was measured and contradicts nothing stays."""
    names = data.draw(st.lists(st.sampled_from(sorted(CARDS)), min_size=2, max_size=6, unique=True))
    measured = data.draw(st.sets(st.sampled_from(names)))
    times = {}
    for name in names:
        sizes = tuple(sorted({1, *data.draw(st.sets(st.sampled_from([2, 3, 4, 5, 8, 16])))}))
        seconds = st.lists(st.floats(1e-4, 10), min_size=len(sizes), max_size=len(sizes)).map(lambda x: np.array(x)[:, None])
        times[name] = Timed(sizes, data.draw(seconds), data.draw(seconds))
    found = {name: own for name, (own, _) in in_order(times, measured, CARDS, "fp16").items()}
    for a in names:
        below = [b for b in names if outdoes(CARDS[a], CARDS[b], "fp16")]
        for b in below:
            for size in range(1, min(found[a].sizes[-1], found[b].sizes[-1]) + 1):
                assert all((x <= y * (1 + 1e-9)).all() for x, y in zip(found[a].at(size), found[b].at(size), strict=True))
        if a in measured and not below:
            assert found[a].sizes == times[a].sizes
            assert np.array_equal(found[a].forward, times[a].forward)


def test_what_is_said_of_scaled_times_is_what_the_bench_finds() -> None:
    half, worst = off(list(rows()))
    corrected, worse = off(list(rows(other_models=True)))
    assert half == pytest.approx(1 + TYPICAL, abs=0.01)
    assert corrected < half
    assert max(worst, worse) == pytest.approx(WORST, abs=0.05)


@given(st.sampled_from([m for m in MEASURED if m.family == "gpt" and m.card != "v100-32"]), st.floats(0.2, 5))
def test_a_time_is_corrected_by_how_both_cards_ran_another_model(m: Any, factor: float) -> None:
    """Of a card that takes `factor` times as long as its data sheet lets expect from another's measurements, for a model of one
    family, the same is expected for a model of another."""
    twin = CARDS[m.card].model_copy(update={"fp32": 2 * CARDS[m.card].fp32, "fp16": 2 * CARDS[m.card].fp16})
    other = m._replace(card="twin", cell=scaled(m, m.sizes, m.tokens, m.precision, twin, CARDS[m.card]))
    slow = other._replace(
        cell=other.cell._replace(
            **{name: tuple(factor * t for t in getattr(other.cell, name)) for name in ("forward", "backward")}
        )
    )
    llama = find_model("llama-7b")
    known = [x for x in MEASURED if (x.card, x.model, x.precision) == (m.card, "llama-7b", m.precision)] + [m]
    if len(known) > 1:
        cards = {m.card: CARDS[m.card], "twin": twin}
        plainly = estimate(llama, 512, m.precision, "twin", cards, [*known, other])
        corrected = estimate(llama, 512, m.precision, "twin", cards, [*known, slow])
        assert (plainly.measured, corrected.measured, corrected.source.model) == (False, False, "llama-7b")
        assert corrected.beside == slow
        assert corrected.cell.forward == pytest.approx([factor * t for t in plainly.cell.forward])


class TestCards:
    """By name."""

    @pytest.mark.parametrize(
        ("name", "card"),
        [
            ("3090", "3090"),
            ("RTX 3090", "3090"),
            ("NVIDIA GeForce RTX 3090", "3090"),
            ("nvidia-geforce-gtx-1080-ti", "1080ti"),
            ("Tesla T4", "t4"),
            ("NVIDIA A100-SXM4-40GB", "a100-40"),
            ("A100", "a100-40"),
            ("v100x16", "v100-16"),
            ("RTX A6000", "a6000"),
            ("Titan RTX", "titan-rtx"),
            ("NVIDIA L40S", "l40s"),
            ("h100-nvl", "h100-nvl"),
            ("NVIDIA H200", "h200"),
        ],
    )
    def test_however_it_is_written(self, name: str, card: str) -> None:
        assert known_cards().find(name) == card

    @pytest.mark.parametrize(
        ("name", "has"),
        [
            ("p40", "fp32 fp16"),
            ("v100", "fp32 fp16"),
            ("t4", "fp32 fp16"),
            ("a100", "fp32 fp16 bf16"),
            ("3090", "fp32 fp16 bf16"),
            ("l4", "fp32 fp16 bf16"),
            ("h100", "fp32 fp16 bf16"),
            ("5090", "fp32 fp16 bf16"),
            ("w6800", "fp32 fp16"),
        ],
    )
    def test_at_which_precisions_a_card_can_compute(self, name: str, has: str) -> None:
        assert CARDS[known_cards().find(name)].precisions == tuple(has.split())

    def test_every_card_has_its_architecture(self) -> None:
        assert [name for name, card in CARDS.items() if card.architecture is None] == []
        older = CARDS["p40"].model_copy(update={"architecture": "maxwell"})
        assert older.precisions == ("fp32",)

    def test_no_name_of_two_cards(self) -> None:
        sheet = CARDS["t4"].model_dump(mode="json", exclude_none=True)
        with pytest.raises(InputError, match="the name 't4' is given to two cards"):
            Cards.parse({"format": "hetpipe.cards/1", "cards": {"t4": sheet, "tesla-t4": sheet}}, "here")

    def test_one_of_ones_own_comes_first(self) -> None:
        mine = Card(memory=1, bandwidth=1e9, fp32=1e12, fp16=1e12, source="mine")
        other = Cards(format="hetpipe.cards/1", cards={"t4": mine})
        assert known_cards().with_more(other).cards["t4"] == mine

    def test_every_name_that_was_measured_is_a_card(self) -> None:
        assert {m.card for m in MEASURED} <= set(CARDS)
        assert len({simplified(name) for name in CARDS}) == len(CARDS)


class TestModels:
    """Sizes."""

    @pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
    def test_the_zoos_gpt2(self, name: str) -> None:
        gpt2 = pytest.importorskip("hetpipe.models.gpt2")
        layers, sizes = gpt2.build(name), find_model(name).sizes
        assert len(layers) == sizes.layers + 2
        count = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        assert count[1] == sizes.layer_parameters
        assert count[0] + count[-1] == sizes.embedding_parameters + sizes.head_parameters

    def test_the_zoos_bert(self) -> None:
        bert = pytest.importorskip("hetpipe.models.bert")
        layers, sizes = bert.build("bert-base"), find_model("bert-base").sizes
        assert len(layers) == sizes.layers + 2
        assert sum(p.numel() for p in layers[1].parameters()) == sizes.layer_parameters
        assert sum(p.numel() for p in layers[0].parameters()) == sizes.embedding_parameters

    @pytest.mark.parametrize(
        ("kind", "keys"),
        [
            ("llama", {"num_key_value_heads": 2, "intermediate_size": 700}),
            ("qwen2", {"num_key_value_heads": 2, "intermediate_size": 700}),
            ("mistral", {"num_key_value_heads": 4, "intermediate_size": 700, "head_dim": 64}),
            ("gpt2", {}),
            ("opt", {"ffn_dim": 900, "word_embed_proj_dim": 256}),
            ("bert", {"intermediate_size": 900}),
        ],
    )
    def test_a_config_of_hugging_face(self, tmp_path: Path, kind: str, keys: dict[str, int]) -> None:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        plain_keys = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 1000}
        config = transformers.AutoConfig.for_model(kind, **plain_keys, **keys)
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config)
        found = find_model(str(tmp_path))
        assert (found.sizes.layers, found.sizes.hidden, found.vocabulary) == (3, 256, 1000)
        lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3]
        counts = [sum(p.numel() for p in m.parameters()) for m in lists]
        assert max(counts) / 3 == pytest.approx(found.sizes.layer_parameters, rel=0.01)  # but for biases

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "no 'model_type' in it"),
            ({"model_type": "mixtral"}, "models of type 'mixtral' are no chains of equal dense layers: they have experts"),
            ({"model_type": "nonesuch"}, "models of type 'nonesuch' are not known"),
            ({"model_type": "persimmon"}, "'persimmon' are not known. Known: bert, bloom, camembert, cohere, electra, gemma, "),
            ({"model_type": "llama"}, "expected hidden_size or n_embd or d_model, a whole number from 1 to"),
            ({"model_type": "llama", "hidden_size": -1}, "found -1"),
        ],
    )
    def test_configs_that_are_refused(self, tmp_path: Path, config: dict[str, Any], message: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=message):
            find_model(str(tmp_path / "config.json"))

    def test_a_name_in_the_cache_of_hugging_face(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = pytest.importorskip("huggingface_hub")
        config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        (tmp_path / "config.json").write_text(json.dumps(config))
        asked = []

        def cached(name: str, file: str, revision: str | None) -> str:
            asked.append((name, file, revision))
            return str(tmp_path / "config.json")

        monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
        found = find_model("somebody/small-gpt")
        assert asked == [("somebody/small-gpt", "config.json", None)]
        assert (found.name, found.family) == ("somebody/small-gpt", "gpt")
        assert found.sizes == (64, 3, 12 * 64**2 + 2 * 64, (100 + 32 + 1) * 64, 100 * 64)

    def test_an_unknown_name_has_near_ones(self) -> None:
        with pytest.raises(InputError, match="unknown model 'lama-7b'; did you mean 'llama-7b'\\? known: .*config.json"):
            find_model("lama-7b")
        with pytest.raises(InputError, match="unknown model 'nobody/nothing-0b'"):
            find_model("nobody/nothing-0b")


class TestShared:
    """What people show each other."""

    def profile(self) -> Profile:
        private = {"host": socket.gethostname(), "path": "/home/somebody", "user": getpass.getuser(), "torch": "2.9.1+cu128"}
        made = make_profile({"Tesla T4": [1.0, 2.0], "NVIDIA GeForce RTX 3090": [0.123456, 0.5]}, sizes=(1, 2), fixed=0.5)
        layers = tuple(x.model_copy(update={"name": f"secret.{i}", "tied": "secret.wte"}) for i, x in enumerate(made.layers))
        link = {"between": ("secret-host", "secret-host"), "bandwidth": 1e9}
        document = made.model_copy(update={"layers": layers, "provenance": private}).model_dump(mode="json", exclude_none=True)
        return Profile.parse({**document, "links": [link], "model": "secret.net:build"}, "here")

    def test_nothing_private_is_left(self, tmp_path: Path) -> None:
        share_profile(self.profile(), "gpt", tmp_path / "shared.json")
        text = (tmp_path / "shared.json").read_text()
        for word in ("secret", "somebody", "/home", socket.gethostname(), "user", "host"):
            assert word not in text
        found = Profile.load(tmp_path / "shared.json")
        assert found == without_private(self.profile(), "gpt")
        assert found.provenance == {"torch": "2.9.1+cu128"}
        assert found.measurements[1].forward_seconds[0] == (0.1235, 0.5)
        assert [layer.tied for layer in found.layers] == ["tied0", "tied0"]

    def test_a_version_that_is_a_path_is_left_out(self) -> None:
        strange = self.profile().model_copy(update={"provenance": {"torch": "/home/me/torch"}})
        assert without_private(strange, "gpt").provenance == {}

    def test_cards_that_are_in_it_and_others(self) -> None:
        found, origins = with_cards(self.profile(), ("t4", "3090", "2080"), CARDS)
        assert [m.device_type for m in found.measurements] == ["t4", "3090", "2080"]
        assert [origins[card][None].measured for card in ("t4", "3090", "2080")] == [True, True, False]
        assert origins["2080"][None].card == "t4"
        ratio = max(8.1 / 10.1, 300 / 448)
        assert found.measurements[2].forward_seconds[0] == pytest.approx([ratio, 2 * ratio])

    def test_at_each_precision_that_a_card_has(self) -> None:
        """Those of a type at several precisions took each other's place. fp16's are taken for bf16 where a card has both."""
        made, kinds = self.profile(), {"Tesla T4": ("fp32", "fp16"), "NVIDIA GeForce RTX 3090": ("fp32", "fp16")}
        own = {m.device_type: m for m in made.measurements}
        several = tuple(
            own[kind].slower(1 + i).model_copy(update={"precision": precision})
            for kind, precisions in kinds.items()
            for i, precision in enumerate(precisions)
        )
        shared = made.model_copy(update={"measurements": several})
        found, origins = with_cards(shared, ("t4", "3090", "2080", "4090", "p40"), CARDS)
        old, new = ("fp32", "fp16"), ("fp32", "fp16", "bf16")
        assert {c: found.precisions(c) for c in origins} == {"t4": old, "3090": new, "2080": old, "4090": new, "p40": old}
        at = {(m.device_type, m.precision): m.forward_seconds for m in found.measurements}
        assert at["t4", "fp16"][0] == pytest.approx([2 * t for t in at["t4", "fp32"][0]])
        assert at["3090", "bf16"] == at["3090", "fp16"]
        assert at["4090", "bf16"] == at["4090", "fp16"] != at["4090", "fp32"]
        assert [origins[card]["bf16"].as_fp16 for card in ("3090", "4090")] == [True, True]
        only = shared.model_copy(update={"measurements": (several[3].model_copy(update={"precision": "bf16"}),)})
        assert not with_cards(only, ("3090",), CARDS)[1]["3090"]["bf16"].as_fp16
        with pytest.raises(InputError, match="was measured only in bf16, and a p40 cannot compute in that"):
            with_cards(only, ("3090", "p40"), CARDS)

    def test_none_of_them_is_known(self) -> None:
        with pytest.raises(InputError, match="was measured on cpu. None of these is a known card. Describe one in a file"):
            with_cards(make_profile({"cpu": [1.0]}), ("t4",), CARDS)

    def test_the_command_asks_with_it(self, run: Any, tmp_path: Path) -> None:
        share_profile(self.profile(), "own", tmp_path / "shared.json")
        asked = ("--gpus", "t4,3090", "--add", "2080", "--profiles", tmp_path / "shared.json", "--global-batch", "8")
        told = run("what-if", "own", *asked, "--json")
        assert told.code == 0, told.err
        assert json.loads(told.out)["tokens_per_sample"] is None
        table = run("what-if", "own", *asked)
        assert "scaled from t4 by data sheets (the worse of its two rates)" in table.out
        assert "samples/s" in table.out
        wrong = run("what-if", "mine", *asked)
        assert "shared profiles have 'own'" in wrong.err
