"""hetpipe: unequal pipeline and data parallelism for unequal devices.

Measure (`profile_model`), plan (`make_plan`; `make_front` over a catalogue), predict (`simulate`), train (`Trainer`,
or `wrap` for one's own loop, with `save_checkpoint` and `load_checkpoint`; `auto` measures, plans and wraps). Each name
is imported when it is first used, so that planning and simulating need no torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe.autowrap import UnusedRank, auto
    from hetpipe.own_checkpoint import load_checkpoint, save_checkpoint
    from hetpipe.pareto import make_front
    from hetpipe.planner import make_plan
    from hetpipe.profiler import profile_model
    from hetpipe.runtime import wrap
    from hetpipe.simulator import simulate
    from hetpipe.trainer import Trainer

__all__ = ["Trainer", "UnusedRank", "__version__", "auto", "load_checkpoint", "make_front", "make_plan", "profile_model",
           "save_checkpoint", "simulate", "wrap"]  # fmt: skip

__version__ = "0.1.0"

# In a checkout `partitioners/` and `models/` lie beside this folder, not in it: with the checkout's root as a
# second place to look, `hetpipe.partitioners` and `hetpipe.models` are found without being installed.
# An installed package has them inside.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "setup.py").is_file():
    __path__.append(str(_ROOT))

_HOMES = {
    "Trainer": "hetpipe.trainer",
    "UnusedRank": "hetpipe.autowrap",
    "auto": "hetpipe.autowrap",
    "load_checkpoint": "hetpipe.own_checkpoint",
    "make_front": "hetpipe.pareto",
    "make_plan": "hetpipe.planner",
    "profile_model": "hetpipe.profiler",
    "save_checkpoint": "hetpipe.own_checkpoint",
    "simulate": "hetpipe.simulator",
    "wrap": "hetpipe.runtime",
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
