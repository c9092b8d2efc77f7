"""For every test: hypothesis without a deadline, since other processes share the cores; and ranks that find this checkout from
any folder (Python's fork server imports ahead only what it finds by itself)."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("hetpipe", deadline=None, print_blob=True)
settings.load_profile("hetpipe")

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")])
)
