"""The command `hetpipe`, and `python -m hetpipe`: heeds signals while everything is still being imported."""

import os

from hetpipe.processes.stopping import RunStopped, heed_signals


def main() -> None:
    """Run the command line."""
    try:
        heed_signals()
        from hetpipe.cli import commands as cli
    except KeyboardInterrupt:
        os._exit(130)
    except RunStopped as stopped:
        os._exit(stopped.exit_code)
    cli.main()


if __name__ == "__main__":
    main()
