"""`python -m tools.stamp`: write commit and changed files beside the sources, for a copy in which git cannot tell.

The stamp is a file that git ignores (.stamp.json). Copy it with the checkout: records made in the copy then name the
commit and the changed files of the checkout. A stamp counts only for the very sources that were stamped.
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
