"""For those who come from FastSpeed (unequal batch sizes under DistributedDataParallel): its Python surface, `Params`,
`FastSpeed` and `cnnCalculateParam`, over hetpipe's engine; and `hetpipe convert fastspeed`, which turns its args.json into a
job. Read in this order:

arguments (args.json), import_path, changes (what is different), convert (the job), calculation, samples, module (any model as one
layer), platform (`Params`, `FastSpeed`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe.fastspeed.calculation import cnnCalculateParam
    from hetpipe.fastspeed.module import one_layer
    from hetpipe.fastspeed.platform import FastSpeed, Params
    from hetpipe.fastspeed.samples import dict_samples

__all__ = ["FastSpeed", "Params", "cnnCalculateParam", "dict_samples", "one_layer"]

_HOMES = {
    "FastSpeed": "platform",
    "Params": "platform",
    "cnnCalculateParam": "calculation",
    "dict_samples": "samples",
    "one_layer": "module",
}


def __getattr__(name: str) -> Any:
    """Imported on first use (PEP 562): converting a config needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hetpipe.fastspeed' has no attribute {name!r}; public: {', '.join(__all__)}")
    return getattr(import_module(f"hetpipe.fastspeed.{_HOMES[name]}"), name)
