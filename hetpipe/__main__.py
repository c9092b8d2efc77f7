"""The command `hetpipe`, and `python -m hetpipe`: heeds Ctrl-C while everything is still being imported."""

import os


def main() -> None:
    """Run the command line."""
    try:
        from hetpipe import cli
    except KeyboardInterrupt:
        os._exit(130)
    cli.main()


if __name__ == "__main__":
    main()
