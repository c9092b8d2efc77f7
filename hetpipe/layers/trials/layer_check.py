"""A layer is tried before it trains: a few rows together, and the same rows apart. Where the parts do not make the whole, in what
the layer gives or in its gradients, it couples samples: cut into micro-batches and replicas, a batch would train something else.
So would a layer that keeps state, or that adds a gradient of its own in backward, once for each micro-batch.

Where the rows of a tensor are between two layers is nobody's business. So parts and whole are compared as they lie one behind the
other in the dimension that grows with the rows, and else as sets of numbers (`compare`); and gradients are those of a sum over
what the layer gives, number by number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.files.messages import cut
from hetpipe.layers.batch_norm import may_normalise_batches, normalises_batches
from hetpipe.layers.model import alongside, as_tuple, as_value
from hetpipe.layers.numbers import without_autocast
from hetpipe.layers.split import gradient_leaves
from hetpipe.layers.stage import alias
from hetpipe.layers.transforms import added_as, lineage_of, tensors_of, uncompiled
from hetpipe.layers.trials.compare import ALIKE, FEW_NUMBERS, MEAN_TOLERANCE, NONE, Difference, of_rows, of_sums, tolerance
from hetpipe.layers.trials.rows import TrialRows
from hetpipe.layers.trials.still import Quiet, Still, fixed_seeds
from hetpipe.layers.untouched.kept import remember
from hetpipe.layers.untouched.kinds import Kinds, Same, structure
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.layers.weights import eagerly, fingerprint

OUTPUTS, GRADIENTS = 1e-4, 1e-3  # by which numbers may differ, of the largest: sums are rounded otherwise in other batches
CUT = "A batch is cut into micro-batches and shared out, so gradients would be wrong."
ACCEPT = (
    "To accept that each micro-batch is a batch of its own to it, write 'coupled_layers: per_microbatch' in the job's model "
    'section, or coupled_layers="per_microbatch" in hetpipe.wrap and hetpipe.auto'
)


class Outcome(NamedTuple):
    """What is wrong, why it could not be found out, and what the last layer gives (None where one of the layers does not run)."""

    fault: str | None = None
    untried: str | None = None
    found: TrialRows | None = None


def try_layers(
    layers: Iterable[tuple[str, nn.Module]],
    given: TrialRows,
    place: Callable[[nn.Module], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> Outcome:
    """Try these layers, up to the first that does not do, or does not run. `given` is what enters the first; in `place(layer)` a
    layer has its values. Layers and generators are afterwards as they were."""
    for name, layer in layers:
        layer, who = uncompiled(layer), f"layer {name!r} ({type(uncompiled(layer)).__name__})"
        try:
            with place(layer), drawing("trial"), torch.enable_grad(), norms_off(layer):
                fault, given = _tried(layer, given)
        except Exception as error:  # what it says of so few rows it says again when it trains, if that is its way
            return Outcome(untried=f"{who}: {cut(f'{type(error).__name__}: {error}')}")
        if fault is not None:
            return Outcome(f"{who} {fault}")
    return Outcome(found=given)


def few_of_each_kind(
    layers: Sequence[tuple[str, nn.Module]], kinds: Kinds, lo: int = 0, look: int = 0
) -> list[tuple[str, nn.Module]]:
    """Choose the layers to try of a chain's layers from `lo` on, with their names: four of each kind, another fourth each time.
    Layers of a kind must still be alike, and have the same numbers in all tensors but their weights, since such numbers may
    say which samples a layer couples. If layers cannot be compared, all are tried."""
    try:
        adapted = any(added_as(layer) is not None for _, layer in layers)
        alike = [(kinds.first[lo + at], _as_it_is(layer, adapted)) for at, (_, layer) in enumerate(layers)]
        own = Kinds.of(alike, [lo + at in kinds.steady for at in range(len(layers))])
    except Exception:  # of an attribute of somebody's class
        return list(layers)
    return [layers[at] for at in own.few(turn=look)]


@contextmanager
def norms_off(module: nn.Module) -> Iterator[None]:
    """In here BatchNorm and its kin, which a user must have accepted, normalise by their running statistics, and gather none."""
    norms = [m for _, m in may_normalise_batches(module) if normalises_batches(m)]
    before = [(m, m.training) for m in norms]
    try:
        for norm in norms:
            norm.training = False
        yield
    finally:
        for norm, training in before:
            norm.training = training


def _tried(layer: nn.Module, given: TrialRows) -> tuple[str | None, TrialRows]:
    """(what is wrong, what the layer gives)."""
    put_back = remember(layer, parameters=True)
    try:
        trial = _Trial(layer, given, put_back)
        if any(normalises_batches(m) for _, m in may_normalise_batches(layer)):  # BatchNorm without running statistics
            return None, trial.given_on.cut_anew()
        return trial.fault(), trial.given_on
    finally:
        put_back()


class _Run(NamedTuple):
    """What a layer gave for some rows, and its gradients, of a sum over that number by number: of its inputs, and of its
    parameters. `added`: the names of those that have one even where the sum is zero, and `state`: shape and hash of each buffer
    and parameter afterwards; one of both is looked at. `plain`: what its plain attributes then are; and `foreign`: whatever else
    would be given a gradient."""

    outputs: tuple[Tensor, ...]
    of_inputs: list[Tensor | None]
    of_parameters: list[Tensor | None]
    added: list[str]
    state: dict[str, tuple[tuple[int, ...], int]]
    plain: dict[str, Tensor]
    foreign: list[Tensor]


class _Trial:
    """One layer, which `put_back` makes what it was, on rows together and apart."""

    def __init__(self, layer: nn.Module, given: TrialRows, put_back: Callable[[], None]) -> None:
        self.layer, self.given, self.put_back, self.fixed = layer, given, put_back, set[int]()
        self.rounded = False  # whether what differs is rounding, of which the layers behind it would make more
        columns = [column for column in zip(given.whole, *given.parts, strict=True) if column[0].is_floating_point()]
        self.exact = not _all(of_rows(whole, parts, given.rows, ALIKE) for whole, *parts in columns).share  # as far as is known
        self.quiet = self.drew = False  # whether nothing seems to be drawn; whether anything was
        with torch.no_grad():
            still, other = Still(), Still()
            self.of_part = [t.shape for t in self.forward(given.parts[0], still)]
            if still.seeds:
                self.forward(given.parts[0], other, "another run")
                self.fixed = fixed_seeds(still, other)
        self.scales, self.grows = list[float](), list[bool]()  # of what the layer gives: how large it is; whether with the rows
        self.run_all()
        if self.quiet and self.drew:
            self.quiet = False
            self.run_all()

    def run_all(self) -> None:
        """The whole, and the parts, the first of them twice."""
        self.put_back()
        self.whole = self.run(self.given.whole, zeros=True)
        self.quiet = not (self.drew or self.exact)  # nothing was drawn in forward and backward, and there is nothing to look at
        self.put_back()
        first, second = (part / sum(self.given.rows) for part in self.given.rows)
        run = self.run(self.given.parts[0], first)
        self.again = self.run(self.given.parts[0], first)  # in the state in which that run left the layer
        self.put_back()
        self.parts = run, self.run(self.given.parts[1], second)
        self.put_back()

    @property
    def given_on(self) -> TrialRows:
        """What the layer gives."""
        parts = self.parts[0].outputs, self.parts[1].outputs
        found = TrialRows(self.whole.outputs, parts, self.given.rows)
        return found.without_rounding(MEAN_TOLERANCE) if self.rounded else found

    def forward(self, leaves: Sequence[Tensor], still: Still | None = None, seed: str = "run") -> tuple[Tensor, ...]:
        """As if nothing were drawn; a layer may write into what it is given."""
        given = [alongside(alias(t) if t.requires_grad and torch.is_grad_enabled() else t.clone(), t) for t in leaves]
        with drawing(seed), eagerly(), self.still(still):
            return as_tuple(self.layer(as_value(given)))

    @contextmanager
    def still(self, still: Still | None = None) -> Iterator[None]:
        """Let what is drawn in here be the same number everywhere, and look at what is computed."""
        watch = Quiet() if self.quiet and still is None else still or Still(self.fixed)
        with watch:
            yield
        self.exact &= watch.exact
        self.drew |= watch.drew

    def run(self, tensors: Sequence[Tensor], part: float = 1.0, *, zeros: bool = False) -> _Run:
        """A forward of this part of the rows, and its gradients; with `zeros` those of zero, too, without a state."""
        leaves = [alongside(t.detach().clone().requires_grad_(t.requires_grad), t) for t in tensors]
        named = dict(_named(list(self.layer.named_modules()), "_parameters"))
        own = {id(t) for t in (*leaves, *named.values())}
        named = {name: p for name, p in named.items() if p.requires_grad}
        outputs = self.forward(leaves)
        if not self.scales:
            self.scales = [_scale(t.detach()) for t in outputs]
            self.grows = [t.shape != shape for t, shape in zip(outputs, self.of_part, strict=True)]
        foreign = [t for t in gradient_leaves(outputs) if id(t) not in own]
        inputs = [t for t in leaves if t.requires_grad]
        names, wanted = [*(f"input {k}" for k in range(len(inputs))), *named], [*inputs, *named.values()]
        of_zero = self.gradients(outputs, wanted, part, 0.0, keep=True) if zeros else [None] * len(wanted)
        added = [name for name, g in zip(names, of_zero, strict=True) if g is not None and bool(g.isfinite().all() and g.any())]
        made = self.gradients(outputs, wanted, part)
        modules = [] if zeros else list(self.layer.named_modules())  # it may have another one now
        held = (*_named(modules, "_buffers"), *_named(modules, "_parameters"))
        state = {name: (tuple(t.shape), int(fingerprint([t.detach()]))) for name, t in held}
        plain = plain_numbers(modules)
        found = tuple(alongside(t.detach().requires_grad_(t.requires_grad), t) for t in outputs)
        return _Run(found, made[: len(inputs)], made[len(inputs) :], added, state, plain, foreign)

    def gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], part: float, factor: float = 1.0, *, keep: bool = False
    ) -> list[Tensor | None]:
        """Of a sum over the outputs, number by number, times `factor`; what does not grow with the rows counts as their part."""
        ends = [row for row in zip(outputs, self.scales, self.grows, strict=True) if row[0].requires_grad]
        if not ends or not leaves:
            return [None] * len(leaves)
        seeds = [torch.sin(t.detach() / scale) + 0.3 if grows else torch.full_like(t, part) for t, scale, grows in ends]
        seeds = [(factor * seed).to(t.dtype) for seed, (t, _, _) in zip(seeds, ends, strict=True)]
        apart = without_autocast(ends[0][0].device)
        with drawing("run"), eagerly(), apart, self.still():  # a layer that checkpoints draws again
            found = torch.autograd.grad([t for t, _, _ in ends], list(leaves), seeds, retain_graph=keep, allow_unused=True)
        return [None if g is None else g.to_dense() if g.is_sparse else g for g in found]

    def fault(self) -> str | None:
        """What is wrong with the layer."""
        made_before = {id(t) for t in self.parts[0].foreign}  # those of one forward only it made itself
        if found := [t for t in self.whole.foreign if id(t) in made_before]:
            return (
                f"uses a tensor of shape {tuple(found[0].shape)} that requires a gradient and is no parameter of it (it is held "
                "in a list, a plain attribute, a global or a closure): the gradient would stay where this layer is, and nobody "
                "would sum it. Let the layer register it, or the module that has it, as an attribute (self.tied = embedding, and "
                "not [embedding]): a parameter that several layers have is tied, and its gradients are summed"
            )
        if self.whole.added:
            return (
                f"adds a gradient of its own in backward (that of {self.whole.added[0]!r} is not zero where that of what the "
                "layer gives is), which would be added once for each micro-batch: let it be a part of the loss, as a mean over "
                f"samples. {ACCEPT}"
            )
        if (name := self.changing()) is not None:
            return f"keeps state: {name!r} changes in its forward, as the samples of a batch say. {CUT} {ACCEPT}"
        most = tolerance(OUTPUTS, self.whole.outputs, exact=self.exact)
        if (name := self.adding_up(most)) is not None:
            return (
                f"keeps state: the tensor in its attribute {name!r} changes in its forward, and depends on what it was before. "
                f"{CUT} {ACCEPT}"
            )
        pairs = zip(self.parts[0].outputs, self.again.outputs, strict=True)
        if (off := _all(of_rows(a, [b], (1,), most) for a, b in pairs)).share and not self.by_rounding(off):
            return f"keeps state: for the same samples it gives something else the second time. {CUT} {ACCEPT}"
        outputs, gradients = self.outputs(most), self.slopes()
        off, what = (outputs, "what it gives differs") if outputs.share else (gradients, "its gradients differ")
        if off.share and not self.by_rounding(outputs | gradients):
            return (
                f"couples the samples of a batch: for {sum(self.given.rows)} samples together, and in two parts, {what} by "
                f"{off.greatest:.2g} of the largest number. {CUT}{_hint(self.layer)} {ACCEPT}"
            )
        return None

    def changing(self) -> str | None:
        """A buffer, or parameter, that changes with every forward, or at first by the samples that come first."""
        for name, now in self.again.state.items():
            first, second = (part.state.get(name, now) for part in self.parts)
            if first != now or (first[0] == second[0] and first != second):
                return name
        return None

    def adding_up(self, most: float) -> str | None:
        """A plain attribute that the same samples make something else the second time: one that only remembers them, they do
        not."""
        for name, now in self.again.plain.items():
            before = self.parts[0].plain.get(name, now)
            if before.shape == now.shape and of_rows(before, [now], (1,), tolerance(most, [now])).share:
                return name
        return None

    def outputs(self, most: float) -> Difference:
        """Of what the layer gives for the parts, and for the whole."""
        columns = zip(self.whole.outputs, *(part.outputs for part in self.parts), strict=True)
        return _all(of_rows(whole, parts, self.given.rows, most) for whole, *parts in columns)

    def slopes(self) -> Difference:
        """Likewise, of its gradients."""
        found = [g for g in (*self.whole.of_inputs, *self.whole.of_parameters) if g is not None]
        most = tolerance(GRADIENTS, [*found, *self.whole.outputs], exact=self.exact)
        columns = zip(self.whole.of_inputs, *(part.of_inputs for part in self.parts), strict=True)
        whole, parts = list(self.whole.of_parameters), [list(part.of_parameters) for part in self.parts]
        rows = NONE
        for own, *others in columns:
            made = [g for g in others if g is not None]
            if own is not None and len(made) == len(others) and any(g.shape != own.shape for g in made):
                rows |= of_rows(own, made, self.given.rows, most)
            else:  # of what all rows share, gradients add up
                whole.append(own)
                for part, g in zip(parts, others, strict=True):
                    part.append(g)
        return rows | of_sums(whole, parts, most)

    def by_rounding(self, off: Difference) -> bool:
        """Whether a difference is but rounding, that decides something now and then, or that a layer makes larger which layers
        before it have made: in float64, of the same rows, there is none. Where the layer does not run in float64, neither is
        there in its own type, or it is in few numbers."""
        if next((t for t in self.whole.outputs if t.dtype == torch.float64), None) is not None:
            return False
        same = self.given.without_rounding()
        try:
            self.rounded = not self.in_double(same).share
        except Exception:
            again = _Trial(self.layer, same, self.put_back)
            self.rounded = off.share < FEW_NUMBERS or not again.difference(tolerance(OUTPUTS, self.whole.outputs)).share
        return self.rounded

    def in_double(self, given: TrialRows) -> Difference:
        """What differs in float64, of these rows."""
        exact = copy.deepcopy(self.layer).double()
        trial = _Trial(exact, given.double(), remember(exact, parameters=True))
        trial.exact = False  # it need not be more alike than this one
        return trial.difference(OUTPUTS)

    def difference(self, most: float) -> Difference:
        """Of all that may show that samples are coupled, or state is kept."""
        pairs = zip(self.parts[0].outputs, self.again.outputs, strict=True)
        return _all(of_rows(a, [b], (1,), most) for a, b in pairs) | self.outputs(most) | self.slopes()


def _named(modules: Sequence[tuple[str, nn.Module]], held: str) -> Iterator[tuple[str, Tensor]]:
    """The parameters, or buffers, of modules by name, each once, as they are now."""
    seen = set[int]()
    for prefix, module in modules:
        for name, tensor in getattr(module, held).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def plain_numbers(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """The tensors of floating-point numbers that these modules have as plain attributes, as they are now."""
    return {
        f"{prefix}.{name}".lstrip("."): tensor.detach().clone()
        for prefix, module in modules
        for name, tensor in vars(module).items()
        if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())
        if tensor.layout == torch.strided and not tensor.is_meta
    }


def _as_it_is(layer: nn.Module, adapted: bool) -> Hashable:
    """A layer's structure and the numbers of its tensors, weights left out: parameters that train, beside adapters all, and what
    transforms made of them."""
    lineage = lineage_of(layer)
    made = {name for part in lineage.made for name in part.names} if lineage is not None else set()
    weights = {
        id(tensor)
        for name, tensor in tensors_of(layer).items()
        if name in made or (isinstance(tensor, nn.Parameter) and (adapted or tensor.requires_grad))
    }

    def numbers(tensor: Tensor) -> Hashable:
        if tensor.is_meta or id(tensor) in weights:
            return None
        return int(fingerprint([tensor.detach()])) if tensor.layout == torch.strided else Same(tensor)

    return structure(layer, numbers)


def _all(found: Iterable[Difference]) -> Difference:
    result = NONE
    for one in found:
        result |= one
    return result


def _scale(tensor: Tensor) -> float:
    """How large the numbers of a tensor are."""
    if not tensor.is_floating_point() or tensor.numel() < 2 or not bool(tensor.isfinite().all()):
        return 1.0
    return float(tensor.double().std(correction=0)) or 1.0


def _hint(layer: nn.Module) -> str:
    """What is likely to be meant otherwise."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first:
            own = f" {name!r}" if name else ""
            return f" Its {type(module).__name__}{own} takes dimension 0 for time, not for samples: give it batch_first=True."
    return ""
