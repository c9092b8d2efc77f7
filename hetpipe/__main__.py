"""The command `hetpipe`, and `python -m hetpipe`: heeds signals while everything is still being imported."""

import os


def main() -> None:
    """Run the command line."""
    try:
        from hetpipe.processes.stopping import RunStopped, heed_signals

        try:
            heed_signals()
            from hetpipe.cli import commands as cli
        except RunStopped as stopped:
            os._exit(stopped.exit_code)
    except KeyboardInterrupt:
        os._exit(130)
    cli.main()


if __name__ == "__main__":
    main()
