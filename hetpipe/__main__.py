"""The command `hetpipe`, and `python -m hetpipe`: a signal just ends it while everything is still being imported."""

import signal


def main() -> None:
    """Run the command line."""
    # Nothing is there yet to be tidied up, and an exception raised in somebody's module can come out of it as another one.
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    from hetpipe.cli import commands as cli

    cli.main()


if __name__ == "__main__":
    main()
