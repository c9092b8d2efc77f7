"""Which layers can be split over several cards, and over how many: those that `hetpipe train` can split, and of which what-if
knows how they are cut, and what shards take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.hf.sizes import CUT, Matrix, Widths, config_matrices, cut_layer, layer_modules, layer_widths
from hetpipe.whatif.adapters.base import QUANTISED, Base
from hetpipe.whatif.models import NamedModel

DEGREES = (2, 4, 8)


class Layer(NamedTuple):
    """The widths and matrices of a layer, and how many parameters it has beside them."""

    widths: Widths
    matrices: tuple[Matrix, ...]
    others: int

    def parameters(self, degree: int) -> int:
        """Parameters of a layer on one of so many cards that split it."""
        found = cut_layer(self.widths, self.matrices, degree)
        assert found is not None
        return self.others + sum(matrix.parameters for matrix in found[1])


def layer_of(model: NamedModel | Profile, base: Base) -> Layer:
    """What is known of the layers of a model, which can be split. InputError with the reason where it cannot, or is not known."""
    if isinstance(model, Profile):
        raise InputError("a shared profile does not say how its layers are split")
    if base in QUANTISED:
        raise InputError(f"what shards of a base in {base} take is not counted")
    if model.config is None or model.family != "llama":
        raise InputError(f"how the layers of {model.name} are split is known of models with a config.json and a gate only")
    styles = layer_modules(model.config.model_type)
    modules = model.modules or styles
    matrices = config_matrices(model.config, modules)
    strange = [m.name for m in matrices if m.name not in CUT or styles.get(m.name, CUT[m.name]) != CUT[m.name]]
    if strange:
        raise InputError(f"{strange[0]} of {model.name} is split in a way that is not counted")
    others = model.sizes.layer_parameters - sum(matrix.parameters for matrix in matrices)
    return Layer(layer_widths(model.config), matrices, others)


def degrees_of(layer: Layer, machines: Sequence[Sequence[str]]) -> Mapping[str, tuple[int, ...]]:
    """Over how many cards of each kind a layer can be split in any of these machines; kinds of which none has two are left
    out."""
    most = Counter[str]()
    for machine in machines:
        most |= Counter(machine)
    able = [degree for degree in DEGREES if cut_layer(layer.widths, layer.matrices, degree) is not None]
    found = {kind: tuple(degree for degree in able if degree <= count) for kind, count in most.items()}
    return {kind: degrees for kind, degrees in found.items() if degrees}
