"""Executing plans: one adapter a back end behind the Engine protocol, and `wrap` for one's own training loop."""

from __future__ import annotations

from hetpipe.runtime.own_loop import wrap

__all__ = ["wrap"]
