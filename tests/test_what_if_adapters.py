"""`hetpipe what-if` with adapters: bytes and what layers save beside torch's, peft's and bitsandbytes'; and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.documents.cluster import Link
from hetpipe.documents.clusters.assumed import CONTEXT_BYTES, CUBLAS_BYTES, with_assumed
from hetpipe.files.messages import InputError
from hetpipe.hf.sizes import Config, Matrix
from hetpipe.predict.cost import Costs
from hetpipe.whatif.adapters.base import Base, matrix_bytes
from hetpipe.whatif.adapters.lora import Lora, lora_of
from hetpipe.whatif.adapters.profile import Adapted
from hetpipe.whatif.adapters.trained import saved_bytes
from hetpipe.whatif.answer import Question, cheapest_card, profile_of
from hetpipe.whatif.cards import known_cards
from hetpipe.whatif.machine import as_cluster
from hetpipe.whatif.models import NamedModel, find_model, popular_models
from tests.support.commands import Command

CARDS = known_cards().cards
LINK = Link(bandwidth=12e9)
QUICK = ("--time-limit", "0.5", "--global-batch", "8")
LLAMA = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 640,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}


def small(tmp_path: Path, **changes: Any) -> NamedModel:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **LLAMA, **changes}))
    return find_model(str(file))


def on_meta(model: NamedModel, lora: Lora) -> tuple[int, int]:
    """Numbers of the base, a shared one once, and of the adapters, as transformers and peft make the model; by names."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    assert model.config is not None
    with torch.device("meta"):
        values = {key: value for key, value in model.config.values.items() if key != "model_type"}
        made = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model.config.model_type](**values))
        peft.inject_adapter_in_model(peft.LoraConfig(r=lora.r, target_modules=list(lora.targets) or "all-linear"), made)
    counts = {name: p.numel() for name, p in made.named_parameters()}
    return sum(n for x, n in counts.items() if "lora_" not in x), sum(n for x, n in counts.items() if "lora_" in x)


def planned(model: NamedModel, lora: Lora, base: Base, card: str, precision: Any) -> tuple[float, float]:
    """Bytes that one card holds of the whole model beside its samples, as plans count them; and of these the framework's."""
    question = Question(model=model, machines=((card,),), cards=CARDS, link=LINK, lora=lora, base=base)
    profile = question.at(profile_of(question)[0], {card: precision})
    cluster = with_assumed(as_cluster(question.machines, CARDS, LINK, None), profile)
    memory = Costs(profile, cluster).stage_memory(card, 0, len(profile.layers), samples=1)
    overhead = cluster.runtime_overhead
    return (memory.static - overhead.device_bytes) / overhead.allocator_factor, overhead.device_bytes


class TestBytes:
    """Of what stays through a step."""

    @pytest.mark.parametrize("text", ["r=16", "r=4,targets=q_proj+v_proj", "r=8,targets=down_proj"])
    @pytest.mark.parametrize("name", ["small", "tied", "qwen3-0.6b", "qwen3-8b", "llama-3-8b", "mistral-7b"])
    def test_those_of_a_model_with_adapters_of_peft(self, name: str, text: str, tmp_path: Path) -> None:
        own = {"small": {}, "tied": {"tie_word_embeddings": True}}
        model, lora = small(tmp_path, **own[name]) if name in own else find_model(name), lora_of(text)
        assert lora is not None
        base, adapters = on_meta(model, lora)
        assert adapters == Adapted.of(model, lora, "bf16").trained * model.sizes.layers
        static, _ = planned(model, lora, "bf16", "3090", "bf16")
        copies = 2  # of adapters in what matrix products are computed in
        assert static - (4 + 4 + 8 + copies) * adapters == pytest.approx(2 * base, rel=0.01)

    @pytest.mark.parametrize(
        ("base", "precision", "of_a_matrix", "of_the_rest"),
        [
            ("as-is", "fp32", 4, 4),
            ("bf16", "fp32", 4, 4),
            ("nf4", "fp32", 0.5 + 1 / 64 + 4 / 64 / 256, 4),
            ("as-is", "fp16", 2, 2),
            ("bf16", "fp16", 2, 2),
            ("nf4", "fp16", 0.5 + 1 / 64 + 4 / 64 / 256, 2),
            ("int8", "fp16", None, 2),
            ("fp8", "fp16", None, 2),
        ],
    )
    def test_a_base_is_held_as_its_card_computes(
        self, base: Base, precision: Any, of_a_matrix: float | None, of_the_rest: float
    ) -> None:
        model, lora = find_model("qwen3-8b"), Lora(r=16)
        adapted = Adapted.of(model, lora, base)
        adapters, matrices = adapted.trained * 36, 36 * sum(m.parameters for m in adapted.matrices)
        rest = model.sizes.embedding_parameters + model.sizes.head_parameters + 36 * 2 * 4096
        held = 36 * sum(m.parameters + 4 * m.outputs for m in adapted.matrices)
        if of_a_matrix is not None:
            held = round(matrices * of_a_matrix)
        static, framework = planned(model, lora, base, "1080ti", precision)
        expected = held + of_the_rest * rest + (16 + (2 if precision == "fp16" else 0)) * adapters
        assert static == pytest.approx(expected, rel=1e-6)
        made = 4096 * 12288 * (4 if precision == "fp32" else 2) if base in ("nf4", "fp8", "int8") else 0
        assert framework == planned(model, lora, "bf16", "1080ti", precision)[1] + made

    def test_a_base_in_float32_has_copies_where_half_precision_is_computed(self, tmp_path: Path) -> None:
        model, lora = small(tmp_path), Lora(r=4)
        adapted, sizes = Adapted.of(model, lora, "as-is"), model.sizes
        whole = sizes.embedding_parameters + sizes.head_parameters + 3 * sizes.layer_parameters
        cast = sizes.head_parameters + 3 * sum(m.parameters for m in adapted.matrices)
        assert adapted.built == "float32"
        adapters = 3 * adapted.trained
        assert planned(model, lora, "as-is", "3090", "fp32")[0] == pytest.approx(4 * whole + 16 * adapters)
        assert planned(model, lora, "as-is", "3090", "bf16")[0] == pytest.approx(4 * whole + 2 * cast + 18 * adapters)

    @pytest.mark.parametrize("shape", [(512, 1024), (1000, 768)])
    def test_those_of_a_matrix_that_bitsandbytes_quantised(self, shape: tuple[int, int]) -> None:
        bnb = pytest.importorskip("bitsandbytes")
        packed, state = bnb.functional.quantize_4bit(torch.randn(shape), quant_type="nf4", compress_statistics=True)
        kept = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
        assert matrix_bytes(Matrix("x", shape[1], shape[0], ""), "nf4", "bfloat16", "bf16") == kept

    def test_the_sizes_of_popular_models_are_those_that_are_published(self) -> None:
        def count(name: str) -> int:
            sizes = find_model(name).sizes
            return sizes.layers * sizes.layer_parameters + sizes.embedding_parameters + sizes.head_parameters

        assert set(popular_models().models) == {"qwen3-0.6b", "qwen3-8b", "llama-3-8b", "llama-3-70b", "mistral-7b"}
        assert count("llama-3-8b") == 8_030_261_248
        assert count("llama-3-70b") == 70_553_706_496
        assert count("mistral-7b") == 7_241_732_096
        assert count("qwen3-8b") + 36 * 2 * 128 == 8_190_735_360, "but for the norms of queries and keys"


def kept_storages(layer: nn.Module, tokens: int, width: int, rotary: nn.Module, *, half: bool) -> int:
    """Bytes that a layer leaves for backward, but for parameters, their copies in half precision and rotary angles."""
    hidden = torch.randn(1, tokens, width, dtype=torch.bfloat16 if half else torch.float32).requires_grad_()
    angles = rotary(hidden, torch.arange(tokens)[None])
    apart = {x.untyped_storage().data_ptr() for x in (*layer.parameters(), *angles)}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart and tokens in tensor.shape:
            kept[storage.data_ptr()] = storage
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        layer(hidden, position_embeddings=angles)
    return sum(storage.nbytes() for storage in kept.values())


def layers_of(kind: str, **changes: Any) -> Iterator[Any]:
    """A layer of transformers that does not train, and its rotary angles."""
    module = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    name = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
    config = getattr(pytest.importorskip("transformers"), f"{name}Config")(**{**LLAMA, **changes})
    config._attn_implementation = "sdpa"
    yield getattr(module, f"{name}DecoderLayer")(config, 0).requires_grad_(False)
    yield getattr(module, f"{name}RotaryEmbedding")(config)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ()])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_a_layer_saves_is_what_autograd_saves(kind: str, half: bool, targets: tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tokens, lora = 96, Lora(r=12, targets=targets)  # 96: the size of no parameter
    layer, rotary = layers_of(kind)
    layer.to(torch.bfloat16 if half else torch.float32)
    adapted = Adapted.of(small(tmp_path, model_type=kind), lora, "bf16")
    peft.inject_adapter_in_model(peft.LoraConfig(r=12, target_modules=[m.name for m in adapted.targets]), layer)
    for name, parameter in layer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    measured = kept_storages(layer, tokens, 256, rotary, half=half)
    said = saved_bytes(adapted.widths, adapted.modules, lora, adapted.targets, tokens, "bf16" if half else "fp32")
    assert said == measured


class TestTimes:
    """Of layers, in the profile."""

    def test_a_base_that_does_not_train_has_no_products_for_its_gradients(self) -> None:
        asked: dict[str, Any] = {
            "model": find_model("qwen3-8b"),
            "machines": (("3090",),),
            "cards": CARDS,
            "link": LINK,
            "tokens": 2048,
        }
        plain, adapted, larger, quantised = (
            profile_of(Question(**asked, **more))[0].at({"3090": "bf16"}).measurements[0]
            for more in ({}, {"lora": Lora(r=1)}, {"lora": Lora(r=64)}, {"lora": Lora(r=1), "base": "nf4"})
        )
        for i, size in enumerate(plain.microbatch_sizes):
            forward, backward = plain.forward[i, 1], plain.backward[i, 1]
            assert forward < adapted.forward[i, 1] < larger.forward[i, 1] < 1.5 * forward
            assert adapted.backward[i, 1] < larger.backward[i, 1]
            assert adapted.backward[i, 1] - 2 * (adapted.forward[i, 1] - forward) == pytest.approx(
                min(backward, forward * (1 + 2 * 2048 * 4096 / (192_946_176 - 8192 + 8192 + 2 * 2048 * 4096))), rel=1e-3
            ), f"attention's own products twice, {size} samples"
            made = quantised.forward[i, 1] - adapted.forward[i, 1]
            matrices = 192_937_984
            assert made == pytest.approx(matrices * (2 + 0.5 + 1 / 64 + 4 / 64 / 256) / 936e9, rel=1e-3)
            assert quantised.backward[i, 1] - adapted.backward[i, 1] == pytest.approx(made)
            assert adapted.backward[i, -1] == min(adapted.forward[i, -1], plain.backward[i, -1])
            assert adapted.forward[i, 0] == adapted.backward[i, 0] == 0


@pytest.mark.thorough
def test_the_cheapest_card_is_the_first_in_the_order_of_prices_with_which_it_fits() -> None:
    asked: dict[str, Any] = {
        "model": find_model("qwen3-8b"),
        "cards": CARDS,
        "link": LINK,
        "tokens": 2048,
        "global_batch": 8,
        "lora": Lora(r=16),
    }
    assert cheapest_card(Question(machines=(("3090", "3090"),), **asked)) is None, "it fits as it is"
    found = cheapest_card(Question(machines=(("3060",),), **asked))
    assert found is not None
    price = CARDS[found].launch_price_usd or 0
    for card, sheet in CARDS.items():
        if sheet.launch_price_usd is not None and sheet.launch_price_usd < price:
            assert cheapest_card(Question(machines=(("3060", card),), **asked)) is not None, f"{card} is cheaper, and not enough"
    assert cheapest_card(Question(machines=(("3060", found),), **asked)) is None
    assert cheapest_card(Question(machines=(("3060",),), prices={"a100-80": 1.0}, **asked)) == "a100-80"
    assert cheapest_card(Question(machines=(("2080",),), **{**asked, "model": find_model("llama-3-70b")})) is None


def test_a_shared_profile_in_half_precision_is_not_asked_of_cards_without_it() -> None:
    question = Question(model=find_model("llama-7b"), machines=(("3090",),), cards=CARDS, link=LINK, global_batch=8)
    shared = profile_of(question)[0].at({"3090": "bf16"})
    found = cheapest_card(Question(model=shared, machines=(("3090",),), cards=CARDS, link=LINK, global_batch=8))
    assert found is None or "bf16" in CARDS[found].precisions


class TestCommand:
    """In this process."""

    def test_it_fits_with_adapters_and_says_what_they_are(self, run: Command) -> None:
        asked = ("qwen3-8b", "--gpus", "3090,1080ti,1080ti", "--length", "2048", "--without", "1080ti", "--json", *QUICK)
        found = run("what-if", *asked, "--lora", "r=16", "--base", "nf4")
        assert found.code == 0, found.err
        told = json.loads(found.out)
        assert told["tokens_per_sample"] == 2048
        assert told["adapters"]["parameters"] == 43_646_976
        assert (told["adapters"]["base"], told["adapters"]["targets"][0], told["cheapest_card"]) == ("nf4", "q_proj", None)
        assert told["rows"][0]["tokens_per_second"] > 0
        assert told["rows"][0]["gap"] >= 0
        assert any("Before each product its matrix is made of nf4" in note for note in told["notes"])

    def test_where_it_does_not_fit_the_table_names_the_card(self, run: Command) -> None:
        found = run("what-if", "qwen3-8b", "--gpus", "3060", "--length", "2048", "--lora", "r=16", *QUICK)
        assert found.code == 0, found.err
        text = " ".join(found.out.split())
        assert "over a base in bfloat16 as it is" in text
        card, price = text.split("The cheapest card that would make it fit is a ")[1].split(" ", 1)
        assert f"for {CARDS[card].launch_price_usd:,.0f}." in price
        assert re.search(rf"with one more .*\+{CARDS[card].launch_price_usd:,.0f} *$", found.out, re.M), "a row with it"

    def test_what_is_counted_once_is_told(self, run: Command, tmp_path: Path) -> None:
        small(tmp_path)
        asked = ("what-if", tmp_path, "--gpus", "3090", "--lora", "r=4", "--json", *QUICK)
        told = [json.loads(run(*asked, *more).out) for more in ((), ("--base", "bf16"), ("--precision", "fp32"))]
        assert [any("has copies of its matrices" in note for note in one["notes"]) for one in told] == [True, False, False]

    def test_the_profile_that_is_written_holds_what_trains(self, run: Command, tmp_path: Path) -> None:
        file = tmp_path / "profile.json"
        found = run("what-if", "qwen3-0.6b", "--gpus", "3090", "--lora", "r=8", "--base", "nf4", "-o", file, *QUICK)
        assert found.code == 0, found.err
        written = json.loads(file.read_text())
        numbers = 8 * ((1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072))
        assert [layer["trained_bytes"] for layer in written["layers"]] == [0, *[4 * numbers] * 28, 0]
        (overhead,) = written["overheads"]
        assert overhead["device_bytes"] - CONTEXT_BYTES - CUBLAS_BYTES == 4 * 1024 * 3072, "of a matrix in float32, the widest"

    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            ("qwen3-8b", ("--lora", "r=0"), "--lora 'r=0': r: Input should be greater than or equal to 1 (got 0)"),
            ("qwen3-8b", ("--lora", "r=16777217"), "--lora 'r=16777217': r must be at most 16777216, got 16777217"),
            ("qwen3-8b", ("--lora", "r=1.5"), "--lora 'r=1.5': r:"),
            ("qwen3-8b", ("--lora", "16"), "--lora '16': unknown key '16'"),
            (
                "qwen3-8b",
                ("--lora", "r=16,use_dora=true"),
                "what-if does not count the vectors that use_dora trains. Leave use_dora out",
            ),
            ("qwen3-8b", ("--lora", "r=8,targets=q_proj+"), "targets are names joined by '+', or all-linear"),
            (
                "qwen3-8b",
                ("--lora", "r=8,targets=q_projs"),
                "qwen3-8b has no matrix 'q_projs'; did you mean 'q_proj'? known: q_p",
            ),
            ("qwen3-8b", ("--base", "nf4"), "--base nf4 is for weights that are frozen beside adapters. Give --lora r=16"),
            ("qwen3-8b", ("--base", "fp4", "--lora", "r=8"), "'fp4' is not one of 'as-is', 'bf16', 'nf4', 'fp8', 'int8'"),
            ("gpt2", ("--lora", "r=8"), "needs the matrices of the layers, and those of 'gpt2' are not known"),
        ],
    )
    def test_what_is_refused(self, run: Command, model: str, options: tuple[str, ...], message: str) -> None:
        found = run("what-if", model, "--gpus", "t4", *options)
        assert found.code == 2
        assert message in " ".join(found.err.replace("│", " ").split())

    def test_a_type_whose_matrices_nobody_names_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="how the matrices of models of type 'gemma9' are called is not known"):
            Adapted.of(small(tmp_path)._replace(config=Config(Path("config.json"), "gemma9", LLAMA)), Lora(r=8), "bf16")


def test_what_finetune_is_told_is_read_here_too() -> None:
    """Scale and dropout take no bytes."""
    assert lora_of("r=8,alpha=4,dropout=0.1,rank_stabilized=true") == Lora(r=8) == lora_of("r=8,targets=all-linear")
    assert lora_of(" none ") is None
