"""`python -m tools.bench.suite LOG... --of RECORD --json FILE`: outcomes of tests (`pytest -rA`) by module.

Runs that were split are given together. `--of` is a record of the same machine and commit, such as the fuzzer's: where
and of what the tests were is taken from it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from tools import filed
from tools.bench.record import JsonPath, runs_of

ABOUT = ("date", "commit", "changed_files", "gpu", "python", "cuda", "versions")
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+\.py)(.*)$", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+\.py)\S*: (.*)$", re.MULTILINE)


def count(text: str) -> dict[str, Any]:
    """Outcomes by module, and why tests were skipped or failed.

    Raises:
        ValueError: no outcomes in it: the run was cut, or without `-rA`.
    """
    modules: dict[str, Counter[str]] = {}
    notes: list[str] = []
    for outcome, module, rest in OUTCOME.findall(text):
        modules.setdefault(module, Counter())[outcome.lower()] += 1
        if outcome in ("FAILED", "ERROR"):
            notes.append(f"{module}{rest}"[:200])
    for number, module, why in SKIPPED.findall(text):
        modules.setdefault(module, Counter())["skipped"] += int(number)
        notes.append(f"{number} skipped in {module}: {why}")
    if not modules:
        raise ValueError("no outcomes of tests in it, expected what `pytest -rA` prints at its end")
    return {"modules": {name: dict(sorted(some.items())) for name, some in sorted(modules.items())}, "notes": notes}


def main(
    logs: Annotated[list[Path], typer.Argument(help="What the runs printed.")],
    of: Annotated[Path, typer.Option(help="A record of the same machine and commit; of a list of runs the last one.")],
    json_to: JsonPath,
) -> None:
    about = runs_of(filed.read(of))[-1]
    texts = [path.read_text() for path in logs]
    notes = [note for text in texts for note in count(text)["notes"]]  # of each by itself, as one may be cut
    json_to.write_text(filed.text({key: about[key] for key in ABOUT} | count("\n".join(texts)) | {"notes": notes}))


if __name__ == "__main__":
    typer.run(main)
