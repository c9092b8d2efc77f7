"""models/*.py: shapes, names, sizes, determinism, and the messages of wrong arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.batch_norm import check_batch_norm
from hetpipe.models import alexnet, cifar_cnn, gpt, mlp, resnet, vgg19

Build = Callable[..., nn.Sequential]

IMAGE = torch.zeros(2, 3, 32, 32)
TINY_GPT: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 8}
CASES: dict[str, tuple[Build, dict[str, Any], Tensor, tuple[int, ...]]] = {
    "gpt": (gpt.build, TINY_GPT, torch.zeros(2, 8, dtype=torch.int64), (2, 8, 256)),
    "mlp": (mlp.build, {"layers": 3, "width": 8, "inputs": 5, "outputs": 4}, torch.zeros(2, 5), (2, 4)),
    "alexnet": (alexnet.build, {"image_size": 32, "classes": 10, "width_multiplier": 0.05}, IMAGE, (2, 10)),
    "vgg19": (vgg19.build, {"image_size": 32, "classes": 10, "width_multiplier": 0.05}, IMAGE, (2, 10)),
    "vgg19-norm": (vgg19.build, {"image_size": 32, "classes": 7, "width_multiplier": 0.05, "batch_norm": True}, IMAGE, (2, 7)),
    "resnet18": (resnet.build, {"image_size": 32, "classes": 10, "width_multiplier": 0.1}, IMAGE, (2, 10)),
    "resnet50-imagenet": (resnet.build, {"depth": 50, "classes": 7, "width_multiplier": 0.05}, torch.zeros(2, 3, 64, 64), (2, 7)),
    "cifar_cnn": (cifar_cnn.build, {"width": 4, "hidden": 8}, IMAGE, (2, 10)),
}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # shared ones once


@pytest.mark.parametrize("name", CASES)
def test_layer_by_layer_is_the_model(name: str) -> None:
    build, arguments, sample, shape = CASES[name]
    model = build(**arguments).eval()
    output = sample
    for layer in model:
        output = layer(output)
        assert isinstance(output, Tensor)
    assert output.shape == shape
    assert torch.equal(output, model(sample))


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_learns_and_the_seed_decides(name: str) -> None:
    build, arguments, sample, _ = CASES[name]

    def built() -> nn.Sequential:
        torch.manual_seed(3)
        return build(**arguments)

    first, second = built(), built()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    inputs = torch.rand_like(sample) if sample.is_floating_point() else sample + 1
    first(inputs).square().sum().backward()
    assert [name for name, parameter in first.named_parameters() if parameter.grad is None] == []


def test_children_are_the_layers_by_name() -> None:
    assert [name for name, _ in gpt.build(**TINY_GPT).named_children()] == [
        "embed",
        "block0_attention",
        "block0_mlp",
        "block1_attention",
        "block1_mlp",
        "head",
    ]
    assert [name for name, _ in mlp.build(layers=2).named_children()] == ["embed", "block0", "block1", "head"]
    assert len(vgg19.build(32, 10, 0.05)) == 20
    assert list(alexnet.build(32, 10, 0.05).state_dict())[:2] == ["conv1.conv.weight", "conv1.conv.bias"]
    assert "block1_mlp.expand.weight" in gpt.build(**TINY_GPT).state_dict()


@pytest.mark.parametrize(
    ("size", "parameters"),  # vocabulary 50,257: the published 124 M, 355 M, 774 M, 1558 M
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_gpt2_has_the_published_parameter_counts(size: str, parameters: int) -> None:
    with torch.device("meta"):
        assert parameter_count(gpt.build(size, vocabulary=50_257)) == parameters


def test_imagenet_models_have_the_published_parameter_counts() -> None:
    with torch.device("meta"):
        assert parameter_count(vgg19.build()) == 143_667_240
        # 62.4 M in one tower; the paper's 60 M come from cutting conv2, conv4 and conv5 in two
        assert parameter_count(alexnet.build()) == 62_378_344
        assert alexnet.build()(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
        assert vgg19.build()(torch.empty(1, 3, 224, 224)).shape == (1, 1000)


@pytest.mark.parametrize(("depth", "parameters", "layers"), [(18, 11_689_512, 10), (34, 21_797_672, 18), (50, 25_557_032, 18)])
def test_resnet_has_the_published_sizes(depth: int, parameters: int, layers: int) -> None:
    with torch.device("meta"):
        model = resnet.build(depth)
        assert parameter_count(model) == parameters
        assert len(model) == layers
        outputs = [torch.empty(2, 3, 224, 224)]
        for layer in model:
            outputs.append(layer(outputs[-1]))
        assert [t.shape[-1] for t in outputs[1:-1]][:: len(model) - 2] == [56, 7]  # table 1
        assert outputs[-1].shape == (2, 1000)


def test_resnet_keeps_the_resolution_of_small_images_and_may_begin_as_its_shortcuts() -> None:
    model = resnet.build(34, 32, 10, 0.1, zero_init_residual=True)
    x = torch.rand(2, 3, 32, 32)
    features = model.get_submodule("stem")(x)
    assert features.shape == (2, 6, 32, 32)
    assert torch.equal(model.get_submodule("block1_1")(features), features)  # relu(0 + what a ReLU gave)
    assert not torch.equal(resnet.build(34, 32, 10, 0.1).get_submodule("block1_1")(features), features)


def test_resnet_needs_a_choice_of_batch_norm() -> None:
    with torch.device("meta"):
        layers = resnet.build(18, 32)
    check_batch_norm(layers, "per_microbatch")
    with pytest.raises(InputError, match=r"the model has BatchNorm \(first: 'stem.conv.norm'\)"):
        check_batch_norm(layers, None)


def test_gpt_ties_one_parameter_or_two() -> None:
    tied, untied = gpt.build(**TINY_GPT), gpt.build(**TINY_GPT, tied=False)
    assert tied.get_parameter("head.project.weight") is tied.get_parameter("embed.token.weight")
    assert parameter_count(untied) - parameter_count(tied) == 256 * 16


def test_gpt_is_causal() -> None:
    torch.manual_seed(0)
    model = gpt.build(**TINY_GPT).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_gpt_starts_at_the_loss_of_a_guess() -> None:
    torch.manual_seed(0)
    model, tokens = gpt.build(layers=4, width=64), torch.randint(256, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # ln 256
    stream = model.get_parameter("block0_attention.project.weight").std().item()
    assert stream == pytest.approx(0.02 / (2 * 4) ** 0.5, rel=0.05)


def test_local_response_norm_is_the_papers() -> None:
    x = torch.rand(1, 5, 2, 2)
    layer = alexnet.build(32, 10, 0.05, local_response_norm=True).get_submodule("conv1.norm")
    # section 3.3: a / (k + alpha * sum of a² over n = 5 neighbours) ^ beta; k = 2, alpha = 1e-4, beta = 0.75
    centre = x[:, 2] / (2 + 1e-4 * x.square().sum(1)) ** 0.75
    assert torch.allclose(layer(x)[:, 2], centre)


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (gpt.build, {"width": 30, "heads": 4}, "gpt: width 30 is not divisible by heads 4"),
        (gpt.build, {"size": "huge"}, "gpt: unknown size 'huge'; known: tiny, small, gpt2, gpt2-medium"),
        (gpt.build, {"layers": 0}, "gpt: layers must be an integer of at least 1, got 0"),
        (gpt.build, {"dropout": 1.0}, "gpt: dropout must be a number from 0 to below 1, got 1.0"),
        (mlp.build, {"width": "64"}, "mlp: width must be an integer of at least 1, got '64'"),
        (mlp.build, {"layers": True}, "mlp: layers must be an integer of at least 1, got True"),
        (alexnet.build, {"image_size": 64}, "alexnet: unknown image_size 64; known: 32, 224"),
        (vgg19.build, {"image_size": 64}, "vgg19: unknown image_size 64; known: 32, 224"),
        (vgg19.build, {"width_multiplier": 0}, "vgg19: width_multiplier must be a number above 0, got 0"),
        (resnet.build, {"depth": 20}, "resnet: unknown depth 20; known: 18, 34, 50"),
        (resnet.build, {"image_size": 64}, "resnet: unknown image_size 64; known: 32, 224"),
        (cifar_cnn.build, {"dropout": -0.1}, "cifar_cnn: dropout must be a number from 0 to below"),
    ],
)
def test_wrong_arguments_name_both_numbers(build: Build, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        build(**arguments)


def test_gpt_refuses_a_sample_longer_than_its_context() -> None:
    with pytest.raises(ValueError, match=r"a sample has 9 tokens, the model's context is 8: .* context=9"):
        gpt.build(**TINY_GPT)(torch.zeros(1, 9, dtype=torch.int64))
