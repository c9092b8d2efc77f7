"""What a loss is tried on: a few real targets, and outputs of the last layer's shape and type, drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetpipe.layers.model import Loss, Model, Tensors, as_tuple, as_value, batch_size, named_layers, select
from hetpipe.layers.numbers import type_name
from hetpipe.layers.split import TensorSpec

ROWS = 32  # samples that a loss is tried on, at most
ROUNDED_ROWS = 5  # where numbers of 16 bits hide what one sample of many changes
MOST_NUMBERS = 1 << 24  # that are drawn for them
DISTINCT_ROWS = 256  # of a batch, among which rows that differ are looked for


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A loss, what the model's last layer gives for `rows` samples, and targets of real samples, with all their positions or not
    (`whole`)."""

    model: Model
    loss: Loss
    output: Sequence[TensorSpec]
    rows: int
    targets: Tensors
    whole: bool = True

    @property
    def layer(self) -> str:
        """The last layer: `'head' (Linear)`."""
        name, layer = named_layers(self.model.layers)[-1]
        return f"{name!r} ({type(layer).__name__})"

    @property
    def what(self) -> str:
        """The output and the targets, for messages."""
        given = ", ".join(map(str, self.output))
        wanted = ", ".join(f"{tuple(t.shape)} of {type_name(t.dtype)}{_range(t)}" for t in as_tuple(self.targets))
        return f"the output of layer {self.layer} ({given}) and targets ({wanted})"


def with_few_rows(trial: Trial) -> Trial | str:
    """The trial with a few rows, and with few positions where rows of many would be too large; or why there can be none."""
    if any(not spec.shape or spec.shape[0] == 0 or spec.shape[0] % trial.rows for spec in trial.output):
        shapes = "; ".join(str(spec.shape) for spec in trial.output)
        return f"the model's output ({shapes}) does not have a row for each sample"
    per_row = sum(torch.Size(spec.shape).numel() // trial.rows for spec in trial.output)
    positions = None
    if 2 * per_row > MOST_NUMBERS:
        positions = _positions(trial, MOST_NUMBERS / (2 * per_row))
        if positions is None:
            return f"the output of two samples would have {2 * per_row} numbers"
    most = ROWS if all(spec.dtype.itemsize >= 4 for spec in trial.output if spec.dtype.is_floating_point) else ROUNDED_ROWS
    rows = 2 if positions is not None else min(most, MOST_NUMBERS // max(1, per_row))
    targets = as_tuple(select(trial.targets, telling_rows(trial.targets, rows)))
    rows = len(targets[0])
    output = [replace(s, shape=(s.shape[0] // trial.rows * rows, *s.shape[1:])) for s in trial.output]
    if positions is not None:
        targets = tuple(t[:, :positions] for t in targets)
        output = [replace(s, shape=(s.shape[0], positions, *s.shape[2:])) for s in output]
    return replace(
        trial, output=output, rows=rows, targets=as_value([t.detach().cpu() for t in targets]), whole=positions is None
    )


def _positions(trial: Trial, part: float) -> int | None:
    """So many of the positions in dimension 1 (of a text, say) as make this part of all, 2 at the least; None if outputs and
    targets do not have the same number of them."""
    shapes = [*(spec.shape for spec in trial.output), *(t.shape for t in as_tuple(trial.targets))]
    lengths = {shape[1] if len(shape) > 1 else 0 for shape in shapes}
    fewer = int(min(lengths) * part)
    return fewer if len(lengths) == 1 and fewer >= 2 else None


def telling_rows(targets: Tensors, most: int) -> Tensor:
    """Indices of `most` rows, 2 at the least, or of all: those with the least and the greatest label, rows that differ, and then
    the first ones; a single row twice."""
    labels, count = as_tuple(targets)[0].detach(), batch_size(targets)
    if count == 1:
        return torch.tensor([0, 0])
    found: list[int] = []
    if labels.numel() and not labels.is_complex():
        flat = labels.reshape(count, -1).cpu()
        found += [int(flat.amax(1).argmax()), int(flat.amin(1).argmin())]
        seen: set[bytes] = set()
        for index, row in enumerate(flat[:DISTINCT_ROWS].contiguous().view(torch.uint8)):
            if (content := row.numpy().tobytes()) not in seen:
                seen.add(content)
                found.append(index)
            if len(seen) == most:
                break
    chosen = list(dict.fromkeys([*found, *range(min(count, most))]))[:most]
    return torch.tensor(sorted(chosen))


def draws(trial: Trial, device: torch.device) -> Iterator[tuple[Tensors, Tensors]]:
    """Outputs and targets to try: any numbers, then such as probabilities are. Labels that are all equal are varied first."""
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: 0.05 + 0.9 * torch.sigmoid(x),
        lambda x: torch.softmax(x, -1),
    ]
    for targets in _varied(trial):
        for kind in kinds:
            draw = torch.Generator().manual_seed(0)
            output = [_drawn(spec, kind, draw).to(device) for spec in trial.output]
            yield as_value(output), as_value([t.to(device) for t in as_tuple(targets)])


def _varied(trial: Trial) -> Iterator[Tensors]:
    """The targets; before them, if they are equal whole numbers, such as differ: a weight of classes shows in these only."""
    first, *others = as_tuple(trial.targets)
    classes = trial.output[0].shape[-1]
    if not first.is_floating_point() and first.dtype != torch.bool and bool((first == first[:1]).all()) and classes > 1:
        step = torch.arange(len(first)).reshape(-1, *[1] * (first.ndim - 1))
        changed = torch.where((first >= 0) & (first < classes), (first + step) % classes, first).to(first.dtype)
        yield as_value([changed, *others])
    yield trial.targets


def _drawn(spec: TensorSpec, kind: Callable[[Tensor], Tensor], draw: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point:
        return kind(torch.randn(spec.shape, generator=draw)).to(spec.dtype).requires_grad_(spec.requires_grad)
    if spec.dtype.is_complex:
        return torch.randn(spec.shape, generator=draw, dtype=spec.dtype).requires_grad_(spec.requires_grad)
    numbers = torch.randint(0, 2, spec.shape, generator=draw)
    numbers.reshape(len(numbers), -1)[:, 0] = 1  # a mask leaves something of each sample
    return numbers.to(spec.dtype)


def _range(labels: Tensor) -> str:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.numel() == 0:
        return ""
    return f", {int(labels.min())} to {int(labels.max())}"
