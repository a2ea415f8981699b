"""The `dualkv` command, also as `python -m dualkv`."""

import sys

from codegen.packages import require


def main() -> None:
    """Runs the command line, or says in one sentence which package it lacks."""
    try:
        for name in ("typer", "rich"):  # `import dualkv` does without
            require(name, "the command line")
    except ImportError as error:
        sys.exit(f"dualkv: {error}")
    from dualkv.cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
