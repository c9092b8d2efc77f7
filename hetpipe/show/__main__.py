"""`python -m hetpipe.show`: what `hetpipe show` does."""

from __future__ import annotations

import sys

import typer

from hetpipe.files.messages import clipped, exit_code
from hetpipe.show.command import show


def main() -> None:
    """Run it; what is wrong with the input is said in a line, with exit code 2."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(show)
    try:
        app()
    except Exception as error:
        if (code := exit_code(error)) == 1:
            raise
        print(f"error: {clipped(str(error))}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
