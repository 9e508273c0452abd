"""`python -m quire` is the command `quire`."""

import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Import and run the command; Ctrl-C ends it without a traceback, also while it is being imported."""
    try:
        from quire.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
