"""Loops of one's own in which nothing goes wrong without a word: what is drawn, added up, changed behind the engine, or given
otherwise to two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hetpipe
from bench.reference import ReferenceEngine
from hetpipe.files.messages import InputError
from hetpipe.layers.device import one_thread
from hetpipe.layers.model import Loss, as_tuple, cross_entropy, mse
from hetpipe.processes.ranks.launch import start_ranks
from tests.support.blocks import WIDTH
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.silence import EPOCHS, PLAN, SHARES, Keeping, Points, loop_over, shuffled
from tests.support.silence_alike import everything
from tests.test_autowrap import unequal


@pytest.fixture(scope="module")
def ran() -> list[dict[str, Any]]:
    """What three ranks found: a pipeline of two beside one device."""
    return run_ranks(everything, cluster_of(2, 1))


def everywhere(ran: list[dict[str, Any]], part: str, what: str) -> Any:
    """What all ranks were told alike."""
    found = [result[part][what] for result in ran]
    assert all(other == found[0] for other in found), found
    return found[0]


def test_steps_leave_the_generators_alone_and_draw_by_seed_rank_and_step(ran: list[dict[str, Any]]) -> None:
    """Dropout on a stage moved torch's generator there, and a shuffled loader read other samples at either end."""
    assert not any(result["draw"]["moved"] for result in ran)
    first, again = everywhere(ran, "draw", "losses")
    assert first == again, "the same under whatever the user's generators are"
    assert len(set(first)) == 3
    drawn = [result["draw"]["drawn"] for result in ran]
    assert all(once == twice for once, twice in drawn)
    whole = [row for once, _ in drawn for row in once]
    assert len(whole) == (3 + 1) * (2 + 2), "layer 7 lies on ranks 1 and 2, with two micro-batches of all of these"
    assert len({number for row in whole for number in row}) == 3 * len(whole), "no rank and no step draws what another has drawn"


def test_steps_add_up_to_the_gradient_of_all_their_batches(ran: list[dict[str, Any]]) -> None:
    """Two steps before one of the optimizer kept the gradients of the second."""
    model = build("tied")
    batches = [tuple(as_tuple(x)[0] for x in batch("tied", sum(SHARES), step)) for step in range(3)]
    reference = ReferenceEngine(model, Loss(function=cross_entropy, weight="tokens"))
    with one_thread(torch.device("cpu")):
        losses = [reference.step(*one) for one in batches]
        reference.step(*(torch.cat(column) for column in zip(*batches, strict=True)))
    truth = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    for result in ran:
        assert result["add up"]["losses"] == pytest.approx(losses, abs=1e-12)
        for name, gradient in result["add up"]["gradients"].items():
            wanted = truth[name]
            assert wanted is not None
            assert torch.allclose(gradient, wanted, rtol=0, atol=1e-12), name
    assert everywhere(ran, "add up", "norm") == pytest.approx(reference.clip_grad_norm_(1e9), abs=1e-12)
    norm, clipped = everywhere(ran, "add up", "replaced")
    assert norm == pytest.approx(2 * reference.clip_grad_norm_(1e9), abs=1e-12), "what stands in .grad is what is clipped"
    assert clipped == pytest.approx(reference.clip_grad_norm_(1e9), rel=1e-5)
    assert "cannot be entered again" in everywhere(ran, "add up", "again")


def test_a_sum_that_was_dropped_begins_anew_or_is_told(ran: list[dict[str, Any]]) -> None:
    """What it divided by counted the batches that were dropped: gradients were a third off."""
    for result in ran:
        heard = result["add up"]
        assert heard["anew"] == pytest.approx(heard["losses"], abs=0)
        assert all(torch.equal(value, heard["gradients"][name]) for name, value in heard["anew gradients"].items())
        assert heard["after"] == heard["losses"][0]
    assert everywhere(ran, "add up", "gone").endswith("or call engine.zero_grad(), which begins the sum anew")


def test_gradients_that_no_optimizer_took_are_told(ran: list[dict[str, Any]]) -> None:
    message = everywhere(ran, "add up", "lost")
    assert message.startswith("the optimizer is given the gradients of the last engine.step only")
    assert "with engine.accumulate():" in message
    assert "engine.zero_grad()" in message


def test_an_optimizer_that_steps_in_backward_is_told() -> None:
    """It took one micro-batch's gradients: parameters were off by 0.8."""
    plan = make_plan([{"cuts": [2], "sizes": [2, 2]}])
    rows, first, last = torch.randn(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    engine = hetpipe.wrap(nn.Sequential(first, last), plan, rows, mse)
    try:
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        hook = last.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(InputError, match="^an optimizer steps within engine.step, as in a hook of register_post_accum"):
            engine.step(rows, rows)
        hook.remove()
        engine.step(rows, rows)
        optimizer.step()
    finally:
        engine.close()


def test_a_micro_batch_without_weight_whose_loss_is_not_zero_is_told() -> None:
    """At the end of the step, by which no rank waits for another; no gradient stays."""
    rows, wanted = torch.randn(4, 3), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3])
    engine = hetpipe.wrap(
        nn.Sequential(nn.Linear(3, 3)),
        make_plan([{"cuts": [1], "sizes": [2, 2]}]),
        rows,
        lambda output, targets: (output**2).sum() / targets.sum(),
        loss_weight=lambda t: t.sum(),
    )
    try:
        with pytest.raises(InputError, match="a micro-batch of 2 samples weighs 0, but its loss is inf: "):
            engine.step(rows, wanted)
        assert all(p.grad is None for p in engine.parameters())
    finally:
        engine.close()


def test_torchs_own_clipping_is_told_once(ran: list[dict[str, Any]]) -> None:
    assert everywhere(ran, "add up", "quiet") == []
    both, alone = ran[0]["add up"]["clipped"] + ran[1]["add up"]["clipped"], ran[2]["add up"]["clipped"]
    for (line,) in (both, alone):  # once a host
        assert "If that was torch.nn.utils.clip_grad_norm_" in line
        assert "call engine.clip_grad_norm_(max_norm)" in line


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("thaw", "'3.norm.weight' was frozen, and is trained; '3.norm.bias' was frozen, and is trained; '3.linear.weight' was"),
        ("freeze", "'5.linear.weight' was trained, and is frozen"),
        ("replace", "'5.linear.weight' is another tensor (.copy_ changes the values of the one that there was)"),
        ("add", "'5.adapter.weight' is new; '5.adapter.bias' is new"),
        ("narrow", "'0.norm.weight' was float64, and is float32; '0.norm.bias' was float64, and is float32"),
        ("assign", "'0.norm.weight' is another tensor"),
    ],
)
def test_what_is_trained_must_stay_what_it_was(ran: list[dict[str, Any]], what: str, change: str) -> None:
    """Whether one rank changed it, or all: it was in no sum of gradients, without a word."""
    message = everywhere(ran, "change", what)
    assert message.startswith(f"what is trained has changed since the engine was made: {change}")
    assert "close the engine (engine.close()), wrap the model again, and make a new optimizer" in message


def test_replicas_are_compared_in_a_loop_of_ones_own(ran: list[dict[str, Any]]) -> None:
    assert [everywhere(ran, "edit", f"edited, step {step}") for step in (0, 1)] == [None, None]
    for what in ("step 2", "saved", "whole"):
        message = everywhere(ran, "edit", f"edited, {what}")
        assert message.startswith("the replicas of layers 0:6 (ranks [0, 2]) hold different parameters"), what


def test_samples_that_differ_at_the_two_ends_are_told(ran: list[dict[str, Any]]) -> None:
    for what in ("swapped", "swapped in an evaluation"):
        message = everywhere(ran, "unlike", what)
        assert message.startswith("the two ends of replica 0 were given different samples: sample 2 of its share is not the same")
    assert everywhere(ran, "unlike", "others") is None


def test_inputs_of_another_type_than_the_samples_are_told_on_all_ranks(ran: list[dict[str, Any]]) -> None:
    """The first stage failed, and the others waited for it."""
    message = everywhere(ran, "unlike", "narrow inputs")
    assert message.startswith("replica 0: its inputs are float32, those of the sample batch float64; what crosses from stage to ")


def test_a_loss_with_parameters_is_refused(ran: list[dict[str, Any]]) -> None:
    """Their gradients stayed on each last stage."""
    own, closure, penalty = (everywhere(ran, "lose", what) for what in ("own", "closure", "penalty"))
    assert "the loss depends on its own parameter 'scale' beside the model's output" in own
    assert "the loss depends on a parameter of shape (3,) beside the model's output" in closure
    assert "the loss depends on the model's parameter '9.linear.weight' beside the model's output" in penalty
    assert all("Make what has parameters the last layer of the model" in message for message in (own, closure, penalty))


def test_a_loss_is_looked_at_again_in_later_steps(ran: list[dict[str, Any]]) -> None:
    """It was tried on the first batch only: masks of later ones made gradients wrong."""
    for what, message in (("detached", "the loss requires no gradient"), ("masked", "the loss is no mean weighed by samples")):
        first, second, third, fourth = everywhere(ran, "lose", what)
        assert (first, second) == (None, None)
        assert message in fourth
        assert (third is not None) == (what == "detached"), "that is looked at in each step; and the mean in 1, 2, 4, …"
        assert everywhere(ran, "lose", f"{what}, gradients") == []


def test_layers_that_couple_samples_are_refused_in_whatever_stage(ran: list[dict[str, Any]]) -> None:
    """On all ranks, by the first step, and before any optimizer takes a gradient."""
    centring, keeping = everywhere(ran, "couple", "centring"), everywhere(ran, "couple", "keeping")
    assert centring.startswith("layer '7' (Centring) couples the samples of a batch: for ")
    assert keeping.startswith("layer '7' (Keeping) keeps state: 'mean' changes in its forward")
    assert all('coupled_layers="per_microbatch" in hetpipe.wrap and hetpipe.auto' in text for text in (centring, keeping))
    assert everywhere(ran, "couple", "centring, gradients") == everywhere(ran, "couple", "keeping, gradients") == []


def test_a_layer_that_cannot_be_tried_is_told_once_and_trains(ran: list[dict[str, Any]]) -> None:
    assert everywhere(ran, "couple", "fours") is None
    lines = [line for result in ran for line in result["couple"]["fours, said"]]
    assert len(lines) == 1
    assert lines[0].startswith("note: whether layers couple samples, or keep state, could not be tried from here on: layer '7'")


def test_buffers_of_replicas_are_those_of_the_one_with_most_samples(ran: list[dict[str, Any]]) -> None:
    """They differed ever after."""
    assert ran[0]["couple"]["buffers"] == [{}] * 4
    net = build("blocks")
    layer = Keeping()
    with one_thread(torch.device("cpu")):
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        part = as_tuple(batch("blocks", 8, 0)[0])[0][:5]
        for rows in (part[:3], part[3:]):
            expected.lerp_(net[:7](rows).mean(0).detach(), 0.1)
    for step in range(4):
        first, second = (result["couple"]["buffers"][step] for result in ran[1:])
        assert first.keys() == {"7.mean", "7.count"} == {f"7.{name}" for name, _ in layer.named_buffers()}
        assert all(torch.equal(first[name], second[name]) for name in first), step
        assert int(first["7.count"]) == 2 * step + 2, "two micro-batches each step, whichever replica counted"
    assert torch.allclose(ran[2]["couple"]["buffers"][0]["7.mean"], expected, rtol=0, atol=1e-12), "replica 0's, of five samples"
    assert everywhere(ran, "couple", "other buffers").startswith("the ranks built different models")
    assert "(the replicas of layers 6:10 (ranks [1, 2]) hold different buffers)" in everywhere(ran, "couple", "other buffers")


def test_predictions_and_inference_mode(ran: list[dict[str, Any]]) -> None:
    net = torch.nn.Sequential(*list(build("blocks"))[:6])
    inputs = as_tuple(batch("blocks", 8, 0)[0])[0]
    outputs = [result["predict"]["output"] for result in ran]
    assert outputs[0] is None
    assert torch.allclose(torch.cat(outputs[1:]), net(inputs), rtol=0, atol=1e-12)
    for result in ran:
        found = result["predict"]
        assert found["evaluation"] == found["plain"] == pytest.approx(found["losses"][0], abs=1e-12)
        assert found["losses"][1] < found["losses"][0]
        assert (found["inferred"] is None) == (found["output"] is None)
        assert found["inferred"] is None or torch.equal(found["inferred"], found["output"])


def test_a_model_that_others_trained_in_part_is_used_in_no_other_way(ran: list[dict[str, Any]]) -> None:
    """Layers that other ranks had trained went on, or into a file, with the values of before the first step."""
    found = [result["rewrap"] for result in ran]
    for what in ("called", "called, closed", "called, again"):
        first, second, whole = (one[what] for one in found)
        assert first.startswith("the model was called as a whole, but other ranks have trained 4 layers ('6', '7', '8', '9')")
        assert second.startswith("the model was called as a whole, but other ranks have trained 6 layers ('0', '1', ")
        assert "engine(x) gives the model's outputs" in first
        assert whole is None, "rank 2 has trained all of them"
    assert found[0]["state"].startswith("model.state_dict() was asked for, but other ranks have trained 4 layers")
    assert "engine.whole_state_dict(), which every rank calls, gives the trained model" in found[0]["state"]
    message = everywhere(ran, "rewrap", "other plan")
    assert message.startswith("rank 1 would train 2 layers ('4', '5') of the model, which other ranks have trained")
    assert "'model.load_state_dict(engine.world.first(engine.whole_state_dict()))' on every rank, before engine" in message


def test_a_model_goes_on_by_another_plan_with_what_was_trained(ran: list[dict[str, Any]]) -> None:
    net, losses = build("blocks"), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with one_thread(torch.device("cpu")):
        for step in range(3):
            if step == 2:
                output = net(as_tuple(batch("blocks", 4, 0)[0])[0]).detach()
            inputs, targets = (as_tuple(x)[0] for x in batch("blocks", 8, step))
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    for result in ran:
        found = result["rewrap"]
        assert found["losses"] == pytest.approx(losses, abs=1e-12)
        assert torch.allclose(found["output"], output, rtol=0, atol=1e-12)
        assert found["hooks"] == 0
    trained = ran[0]["rewrap"]["trained"]
    assert all(torch.allclose(trained[name], tensor, rtol=0, atol=1e-12) for name, tensor in net.state_dict().items())


def test_arguments_that_differ_between_ranks_are_told(ran: list[dict[str, Any]]) -> None:
    """Replicas trained another loss, or ranks waited for a trial that another left out."""
    first, *lines = everywhere(ran, "differ", "wrapped").splitlines()
    assert first.startswith("the ranks differ in what must be the same on all hosts")
    told = {line.strip().split(" is ")[0]: re.sub(r" \(host [^)]*\)", "", line) for line in lines}
    others = {"coupled_layers", "loss_weight", "the mode of the model's modules"}
    assert told.keys() == {"loss_fn", "the content of loss_fn", *others}
    assert told["loss_fn"].endswith("'hetpipe.layers.model.mse' on ranks 0, 1, 'hetpipe.layers.model.cross_entropy' on rank 2")
    assert told["coupled_layers"].endswith("is None on ranks 0, 1, 'per_microbatch' on rank 2")
    assert told["loss_weight"].endswith("is 'samples' on ranks 0, 1, 'tokens' on rank 2")
    assert told["the mode of the model's modules"].endswith("is 'train' on ranks 0, 1, 'eval' on rank 2")


def test_replicas_that_share_different_batches_are_told(ran: list[dict[str, Any]]) -> None:
    """Samples were trained twice, and others never."""
    for what in ("same batch", "same batch in an evaluation", "not shared"):
        assert everywhere(ran, "differ", what) is None, what
    for what in ("other batch", "other batch in an evaluation"):
        message = everywhere(ran, "differ", what)
        assert message.startswith("rank 2 gave engine.share another batch of targets than rank 1: it takes the same global batch")


def test_replicas_in_different_modes_are_told(ran: list[dict[str, Any]]) -> None:
    message = everywhere(ran, "differ", "modes")
    assert message.startswith("layer '7' is in the mode 'train' on rank 1 and in 'train, but for linear eval' on rank 2")


def one_device(dropout: float) -> tuple[list[float], list[list[int]]]:
    """The losses, and the samples of each batch, of a plain loop over a shuffled loader."""
    model, loader, seen = loop_over(dropout)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for _ in range(EPOCHS):
        for x, y, number in loader:
            seen.append(number.tolist())
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, seen


@pytest.mark.parametrize("way", ["wrap", "auto"])
def test_a_shuffled_loader_gives_all_ranks_one_devices_samples_in_its_order(way: str, tmp_path: Path) -> None:
    """Dropout on one stage, or measuring on one rank, moved the generator from which the order is drawn."""
    plan, cluster = (PLAN, cluster_of(2, 1)) if way == "wrap" else (None, unequal())
    runs = start_ranks(shuffled, (plan, cluster, str(tmp_path)), cluster.devices)
    with one_thread(torch.device("cpu")):
        losses, order = one_device(0.0)
    assert len(DataLoader(Points())) * EPOCHS == sum(map(len, order))
    for result in runs:
        assert [run["order"] for run in result] == [order] * len(result), "also the one that measures, and with Dropout"
        assert result[0]["losses"] == result[1]["losses"] == pytest.approx(losses, abs=1e-9)
        assert result[2]["losses"] == result[3]["losses"] != result[0]["losses"]
