"""The chain: embedding, blocks, head. Logits, loss and gradients are transformers' own bits.

Shapes: b samples, t tokens, w features, v words. Inputs are int64 [b, t] tokens, or a tuple of these and what else the model's
forward is given, as `extras` names it: a mask [b, t] of 1 (token) and 0 (padding), positions [b, t]. These travel with the
features; without them nothing but the features crosses a boundary. Labels [b, t], where the head computes the loss, come last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.folder import WeightFolder
from hetpipe.hf.replay.parallel import styles
from hetpipe.hf.replay.skeleton import Anatomy, Call, Skeleton, Stop, features_of, skeleton_of
from hetpipe.layers.losses.chunked import IGNORED, losses_of_logits, token_losses
from hetpipe.layers.model import Tensors, as_tuple, as_value, came_along, send_along

_POSITIONS = "max_position_embeddings"
_CHOICE = "_experts_implementation"
GROUPED = ("grouped_mm", "batched_mm")  # transformers' names of the two ways to multiply by experts


class Part(HFLayer):
    """A layer of the chain, which holds these modules of the model, by their paths, and runs the rest of it around them."""

    def __init__(
        self, model: nn.Module, skeleton: Skeleton, paths: Sequence[str], extras: Sequence[str], *, labels: bool = False
    ) -> None:
        super().__init__()
        anatomy = skeleton.anatomy
        self.extras, self.labels = tuple(extras), labels
        names = _own_names([*paths, *anatomy.tables])
        self.paths = {own: path for own, path in names.items() if path not in anatomy.tables}
        self.tables = {own: path for own, path in names.items() if path in anatomy.tables}
        for own, path in self.paths.items():
            self.add_module(own, model.get_submodule(path))
        for own, path in self.tables.items():
            self._hold(own, model, path)
        self.__dict__["skeleton"] = skeleton  # no module of this one: its tensors have no values

    def _hold(self, own: str, model: nn.Module, path: str) -> None:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        if name in module._parameters:
            self.register_parameter(own, module._parameters[name])
        else:
            self.register_buffer(own, module._buffers[name], persistent=name not in module._non_persistent_buffers_set)

    def ready(self) -> AbstractContextManager[Skeleton]:
        """The rest of the model, in here with the modules that this layer holds now."""
        skeleton: Skeleton = self.__dict__["skeleton"]
        modules = {path: self._modules[own] for own, path in self.paths.items()}
        return skeleton.lent(modules, {path: getattr(self, own) for own, path in self.tables.items()})

    def parts(self, given: Tensors) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(tokens or features, what comes beside them, labels or nothing). ValueError where labels are missing."""
        first, *extras = as_tuple(given)
        at = len(extras) - self.labels
        if at < 0 or any(t.is_floating_point() or t.dtype == torch.bool for t in extras[at:]):
            raise ValueError(
                "the last tensor of a sample's inputs must be its labels, whole numbers, since the model was built with labels"
            )
        return first, extras[:at], extras[at:]

    def named(self, extras: Sequence[Tensor]) -> dict[str, Tensor]:
        """What comes beside tokens or features, by name. ValueError where there is more than has a name."""
        if len(extras) > len(self.extras):
            raise ValueError(
                f"a sample has {len(extras)} tensors beside its tokens, and the model names {len(self.extras)} "
                f"({', '.join(self.extras)}): name all in extras, in their order"
            )
        return dict(zip(self.extras, extras, strict=False))


class Embedding(Part):
    """Tokens, and what else there is, to [b, t, w], and that. Of a sample with several `rows`, whose inputs are [b, rows, t],
    each row is one of those that go on, [b · rows, t, w]. `longest`: how many positions the model has learned, and the key of
    its configuration that says so; None where it has learned none."""

    longest: tuple[int, str] | None = None
    rows = 1

    def forward(self, given: Tensors) -> Tensors:
        if self.rows > 1:
            given = as_value([tensor.flatten(0, 1) for tensor in as_tuple(given)])
        tokens, extras, labels = self.parts(given)
        named = self.named(extras)
        if self.longest is not None and "position_ids" not in named:
            self._check_length(tokens.shape[1], *self.longest)
        extras = [extra.bool() if name == "attention_mask" else extra for name, extra in named.items()]
        found: list[Tensor] = []

        def act(number: int, call: Call) -> Tensor:
            found.append(call.hidden)
            raise Stop

        with self.ready() as skeleton:
            skeleton.mode(self.training)
            skeleton.run(act, input_ids=tokens, **self.named(extras))
        return as_value([found[0], *extras, *labels])

    def _check_length(self, length: int, longest: int, key: str) -> None:
        if length > longest:
            kind = self.origin.model.config.model_type
            raise ValueError(f"{kind}: a sample has {length} tokens, the model's {key} is {longest}: shorten the samples")


class Block(Part):
    """One of the layers that are alike, which it holds under the name `called`: [b, t, w], and what else there is, to the
    same."""

    def __init__(
        self, model: nn.Module, skeleton: Skeleton, number: int, called: str, extras: Sequence[str], *, labels: bool = False
    ) -> None:
        super().__init__(model, skeleton, skeleton.anatomy.shared, extras, labels=labels)
        self.number, self.called = number, called
        layer = model.get_submodule(skeleton.anatomy.layers)[number]  # type: ignore[index]
        self.add_module(called, layer)
        self.tensor_parallel = styles(model.config, skeleton.anatomy.layers, layer, called)
        self.experts = any(getattr(config, _CHOICE, None) in GROUPED for config in _configs(layer))

    @property
    def inner(self) -> nn.Module:
        """The model's layer, as it is held now: adapters and torch.compile replace modules."""
        return self.get_submodule(self.called)

    def forward(self, given: Tensors) -> Tensors:
        hidden, extras, labels = self.parts(given)
        calls: list[Call] | None = came_along(hidden)
        if calls is None:
            with self.ready() as skeleton:
                calls = skeleton.calls(hidden, self.named(extras))
        if self.experts:
            choose_experts(self.inner, hidden)
        out = features_of(calls[self.number].on(self.inner, hidden))
        if not torch.compiler.is_compiling():
            send_along(out, calls)
        return as_value([out, *extras, *labels])


class Head(Part):
    """What comes after the last layer: [b, t, w], and what else there is, to logits [b, t, v]; or, with labels, to the loss of
    each token [b, t] (0 where its label is -100) and whether its greatest logit is its label's [b, t]. Where the logits are the
    very output of a `linear` layer, at this path, they are then never there at once. Of a sample with several `rows` they stand
    beside each other again, [b, rows, t]. `scores`: the linear layer gives one number for each sample, [b], of the features at
    its last label that is not -100."""

    words: int
    linear: str | None = None
    rows = 1
    scores = False

    def forward(self, given: Tensors) -> Tensors:
        found = self._of_rows(given)
        return found if self.rows == 1 else as_value([own.unflatten(0, (-1, self.rows)) for own in as_tuple(found)])

    def _of_rows(self, given: Tensors) -> Tensors:
        hidden, extras, labels = self.parts(given)
        if labels and self.linear is not None:
            linear, features = self._before(self.linear, hidden, extras)
            if self.scores:
                return linear(features[torch.arange(len(features), device=features.device), last_known(labels[0])]).squeeze(-1)  # type: ignore[no-any-return]
            return token_losses(features, *_plain(self.linear, linear), labels[0])
        with self.ready() as skeleton:
            logits: Tensor = self._run(skeleton, hidden, extras).logits
        return losses_of_logits(logits, labels[0]) if labels else logits

    def _run(self, skeleton: Skeleton, hidden: Tensor, extras: Sequence[Tensor]) -> Any:
        """Dropout before the first layer is not drawn, or else later numbers would depend on the cut."""

        def act(number: int, call: Call) -> Tensor:
            if number < skeleton.count - 1:
                return call.hidden
            skeleton.mode(self.training)
            return hidden

        skeleton.mode(False)
        return skeleton.dry(hidden, self.named(extras), act)

    def _before(self, path: str, hidden: Tensor, extras: Sequence[Tensor]) -> tuple[nn.Module, Tensor]:
        """The linear layer at this path, and what it would be given."""
        found = list[Tensor]()

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.append(args[0])
            raise Stop

        with self.ready() as skeleton:
            linear = skeleton.model.get_submodule(path)
            handle = linear.register_forward_pre_hook(stop)
            try:
                self._run(skeleton, hidden, extras)
            finally:
                handle.remove()
        return linear, found[0]


def _plain(path: str, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Its weight and bias. ValueError where it is more than a linear layer."""
    if type(linear) is not nn.Linear:  # an adapter, say
        raise ValueError(
            f"the loss is computed with the weight of {path!r}, which must be a plain nn.Linear and is of type "
            f"{type(linear).__name__}: build the model without labels, or leave its head as it is"
        )
    return linear.weight, linear.bias


def last_known(labels: Tensor) -> Tensor:
    """Where the last label of each sample is that is not -100, [b]: 0 where there is none."""
    return (labels != IGNORED).int().mul(torch.arange(labels.shape[-1], device=labels.device)).argmax(-1)


def chain(
    model: Any,
    anatomy: Anatomy,
    folder: WeightFolder | None,
    extras: Sequence[str],
    *,
    labels: bool = False,
    called: str = "layer",
    seed: int | None = None,
    new: tuple[str, ...] = (),
) -> nn.Sequential:
    """The model, on the meta device, as a chain. What no token comes through is not trained. `called`: what each of its layers
    is, `layer3.layer.mlp`; `seed`, `new`: see `Origin`."""
    for path in anatomy.idle:
        model.get_submodule(path).requires_grad_(False)
    skeleton = skeleton_of(model, anatomy)
    first = Embedding(model, skeleton, [*anatomy.embed, *anatomy.idle], extras, labels=labels)
    first.longest = _longest(model, anatomy)
    children: OrderedDict[str, HFLayer] = OrderedDict(embed=first)
    for number in range(len(model.get_submodule(anatomy.layers))):
        children[f"{called}{number}"] = Block(model, skeleton, number, called, extras, labels=labels)
    paths = list(dict.fromkeys([*anatomy.shared, *anatomy.head]))
    children["head"] = head = Head(model, skeleton, paths, extras, labels=labels)
    head.words, head.linear = anatomy.words, anatomy.logits
    return (
        Origin(model, folder, new, seed=seed).assemble(children).train()
    )  # what a layer shares with a skeleton was set to evaluation


def _longest(model: Any, anatomy: Anatomy) -> tuple[int, str] | None:
    """How many positions are learned, if a table of its own has one row for each."""
    config, words = model.config.get_text_config(), model.get_input_embeddings()
    most = getattr(config, _POSITIONS, None)
    tables = [module for path in anatomy.embed if (module := model.get_submodule(path)) is not words]
    learned = most != config.vocab_size and any(type(t) is nn.Embedding and t.num_embeddings == most for t in tables)
    return (most, config.attribute_map.get(_POSITIONS, _POSITIONS)) if learned and isinstance(most, int) else None


def choose_experts(layer: nn.Module, hidden: Tensor) -> None:
    """Mixtures of experts are computed by a grouped product where there is one of such numbers: none is of float64, nor of
    tensors without values, whatever their type. There each token's experts are multiplied for themselves."""
    grouped = not isinstance(hidden, FakeTensor) and hidden.dtype != torch.float64
    for config in _configs(layer):
        if getattr(config, _CHOICE, None) in GROUPED:
            setattr(config, _CHOICE, GROUPED[0] if grouped else GROUPED[1])


def _configs(layer: nn.Module) -> list[Any]:
    return [module.config for module in layer.modules() if hasattr(module, "config")]


def _own_names(paths: Sequence[str]) -> dict[str, str]:
    """A name for each path: as much of its end as tells it from the others."""
    found, depth = dict[str, str](), 1
    while len(found) < len(paths):
        found = {"_".join(path.split(".")[-depth:]): path for path in paths}
        depth += 1
    return found
