"""The compiler of the partitioners' loops: that of the simulator."""

from hetpipe.predict.compiled import compiled, get_ready, inlined

__all__ = ["compiled", "get_ready", "inlined"]
