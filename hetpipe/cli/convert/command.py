"""`hetpipe convert TRAINER FILE`."""

from __future__ import annotations

import typer

from hetpipe.cli.convert.fastspeed import fastspeed
from hetpipe.cli.convert.trainers import axolotl, llamafactory

app = typer.Typer(help="Turn another trainer's config into a job.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Turn another trainer's config into a job."""


app.command()(fastspeed)
app.command()(llamafactory)
app.command()(axolotl)
