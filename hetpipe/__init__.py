"""hetpipe: unequal pipeline and data parallelism for unequal devices.

Measure (`profile_model`), plan (`make_plan`; `make_front` over a catalogue), predict (`simulate`), train (`Trainer`,
or `wrap` for one's own loop, with `save_checkpoint` and `load_checkpoint`; `auto` measures, plans and wraps;
`chain` cuts a model whose forward calls blocks; `adapt` adds matrices of low rank; `fused_cross_entropy` is the loss of
large vocabularies), and use what was trained (`load_weights`, `export_weights`).
Each name is imported when it is first used, so that planning and simulating need no torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe.building.datasets import DataSplits
    from hetpipe.building.streams.streamed import Made, Streamed
    from hetpipe.checkpoints.own.checkpoint import load_checkpoint, save_checkpoint
    from hetpipe.checkpoints.trained import load_weights
    from hetpipe.documents.cluster import Cluster
    from hetpipe.documents.job import Job
    from hetpipe.documents.options import PlanOptions
    from hetpipe.documents.plan import Plan
    from hetpipe.documents.profile import Profile
    from hetpipe.files.messages import InputError
    from hetpipe.hf.exports.export import export_weights
    from hetpipe.layers.adapters.adapt import adapt
    from hetpipe.layers.adapters.names import library_names
    from hetpipe.layers.losses.fused import fused_accuracy, fused_cross_entropy
    from hetpipe.layers.replay.chain import chain
    from hetpipe.measuring.profiler import profile_model
    from hetpipe.planning.pareto import make_front
    from hetpipe.planning.partition import PartitionError
    from hetpipe.planning.planner import make_plan
    from hetpipe.predict.simulator import simulate
    from hetpipe.training.observers.observer import Observer
    from hetpipe.training.own.auto import UnusedRank, auto
    from hetpipe.training.own.loop import wrap
    from hetpipe.training.trainer import Trainer

__all__ = [
    "Cluster",
    "DataSplits",
    "InputError",
    "Job",
    "Made",
    "Observer",
    "PartitionError",
    "Plan",
    "PlanOptions",
    "Profile",
    "Streamed",
    "Trainer",
    "UnusedRank",
    "__version__",
    "adapt",
    "auto",
    "chain",
    "export_weights",
    "fused_accuracy",
    "fused_cross_entropy",
    "library_names",
    "load_checkpoint",
    "load_weights",
    "make_front",
    "make_plan",
    "profile_model",
    "save_checkpoint",
    "simulate",
    "wrap",
]

__version__ = "0.1.0"

# In a checkout `partitioners/` and `models/` lie beside this folder, not in it: with the checkout's root as a
# second place to look, `hetpipe.partitioners` and `hetpipe.models` are found without being installed.
# An installed package has them inside.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "setup.py").is_file():
    __path__.append(str(_ROOT))

_HOMES = {
    "Cluster": "hetpipe.documents.cluster",
    "DataSplits": "hetpipe.building.datasets",
    "InputError": "hetpipe.files.messages",
    "Job": "hetpipe.documents.job",
    "Made": "hetpipe.building.streams.streamed",
    "Observer": "hetpipe.training.observers.observer",
    "PartitionError": "hetpipe.planning.partition",
    "Plan": "hetpipe.documents.plan",
    "PlanOptions": "hetpipe.documents.options",
    "Profile": "hetpipe.documents.profile",
    "Streamed": "hetpipe.building.streams.streamed",
    "Trainer": "hetpipe.training.trainer",
    "UnusedRank": "hetpipe.training.own.auto",
    "adapt": "hetpipe.layers.adapters.adapt",
    "auto": "hetpipe.training.own.auto",
    "chain": "hetpipe.layers.replay.chain",
    "export_weights": "hetpipe.hf.exports.export",
    "fused_accuracy": "hetpipe.layers.losses.fused",
    "fused_cross_entropy": "hetpipe.layers.losses.fused",
    "library_names": "hetpipe.layers.adapters.names",
    "load_checkpoint": "hetpipe.checkpoints.own.checkpoint",
    "load_weights": "hetpipe.checkpoints.trained",
    "make_front": "hetpipe.planning.pareto",
    "make_plan": "hetpipe.planning.planner",
    "profile_model": "hetpipe.measuring.profiler",
    "save_checkpoint": "hetpipe.checkpoints.own.checkpoint",
    "simulate": "hetpipe.predict.simulator",
    "wrap": "hetpipe.training.own.loop",
}


def __getattr__(name: str) -> Any:
    """The public functions, imported on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hetpipe' has no attribute {name!r}; public: {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
