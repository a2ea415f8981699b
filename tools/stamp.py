"""`python -m tools.stamp`: leave commit and changed files beside the sources, for a copy of them without git.

The stamp is a file that git ignores (.stamp.json), to be copied with the checkout. What is recorded of the copy then
says what git would have said; a copy whose sources are not those that were stamped records nothing.
"""

from __future__ import annotations

import json
import sys

from dualkv.bench import run


def main() -> None:
    found = run.checkout()
    if found is None:
        sys.exit(f"stamp: git knows nothing of {run.ROOT}, expected a checkout of this repository")
    run.STAMP.write_text(json.dumps({**found, "source_digest": run.source_digest()}, indent=1) + "\n")
    print(f"{run.STAMP.name}: commit {found['commit'][:7]}, {len(found['changed_files'])} changed files")


if __name__ == "__main__":
    main()
