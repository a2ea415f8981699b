"""The `dualkv` command, also as `python -m dualkv`."""

import sys

NEEDED = ("typer", "rich")  # by the command line alone: `import dualkv` does without


def main() -> None:
    """Runs the command line, or says in one sentence which package it lacks."""
    try:
        from dualkv.cli.commands import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.exit(f"dualkv: {missing} is missing, which the command line needs: pip install {' '.join(NEEDED)}")
    run()


if __name__ == "__main__":
    main()
