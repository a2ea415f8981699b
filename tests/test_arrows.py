"""Imports follow the layers of the repository, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Rows of files and folders. A row may import itself, the rows of the places that it names, and what those may import.
# A file belongs to the row with the longest place that it begins with.
ROWS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("cute_kernels/abi.py",): (),
    ("cute_kernels/",): ("cute_kernels/abi.py",),
    ("codegen/packages.py", "codegen/surface.py"): (),
    ("codegen/",): ("cute_kernels/abi.py", "codegen/packages.py"),
    ("dualkv/layout.py", "dualkv/segments.py", "dualkv/arrays.py", "dualkv/prefixes.py", "dualkv/tokens.py"): (
        "cute_kernels/abi.py",
        "codegen/packages.py",
    ),
    ("dualkv/data/",): ("dualkv/layout.py",),
    ("dualkv/ops/",): ("dualkv/layout.py", "codegen/"),
    (
        "dualkv/branch_shards.py",
        "dualkv/branches.py",
        "dualkv/canary.py",
        "dualkv/context_parallel.py",
        "dualkv/context_plan.py",
        "dualkv/draws.py",
        "dualkv/fixed_rows.py",
        "dualkv/grpo.py",
        "dualkv/heads.py",
        "dualkv/logprobs.py",
        "dualkv/models.py",
        "dualkv/packed_rows.py",
        "dualkv/observer.py",
        "dualkv/progress.py",
        "dualkv/recompute_passes.py",
        "dualkv/row_costs.py",
        "dualkv/sequence_parallel.py",
        "dualkv/walked_values.py",
        "dualkv/walks.py",
    ): ("dualkv/data/", "dualkv/ops/"),
    ("dualkv/integrations/",): ("dualkv/grpo.py",),
    ("dualkv/__init__.py", "dualkv/openmp.py"): ("dualkv/integrations/",),
    ("dualkv/integrations/recurrent/",): ("dualkv/integrations/",),
    ("dualkv/integrations/transformers/",): ("dualkv/__init__.py", "dualkv/integrations/recurrent/"),
    ("dualkv/integrations/megatron/",): ("dualkv/integrations/transformers/",),
    ("dualkv/integrations/experts.py",): ("dualkv/integrations/transformers/",),
    ("dualkv/integrations/swift.py",): ("dualkv/integrations/transformers/",),
    ("dualkv/integrations/openrlhf/",): ("dualkv/integrations/transformers/",),
    ("dualkv/integrations/skyrl/",): ("dualkv/integrations/transformers/",),
    ("dualkv/integrations/trl/",): ("dualkv/integrations/transformers/",),
    ("dualkv/integrations/verl/",): ("dualkv/integrations/transformers/", "dualkv/integrations/megatron/"),
    ("dualkv/bench/",): ("dualkv/__init__.py",),
    ("dualkv/demo/",): ("dualkv/integrations/transformers/",),
    ("dualkv/cli/", "dualkv/__main__.py"): ("dualkv/bench/", "dualkv/demo/"),
    ("tools/",): ("dualkv/cli/", "dualkv/integrations/trl/", "dualkv/integrations/verl/"),
    ("deploy/",): ("dualkv/__init__.py",),
    ("tests/",): (
        "tools/",
        "dualkv/integrations/swift.py",
        "dualkv/integrations/openrlhf/",
        "dualkv/integrations/skyrl/",
        "cute_kernels/",
    ),
}
FOLDERS = sorted({place.split("/")[0] for row in ROWS for place in row})


def row_of(file: str) -> tuple[str, ...]:
    """The row that names the file, or else the innermost of its folders."""
    found = [(len(place), row) for row in ROWS for place in row if file.startswith(place)]
    assert found, f"{file} has no row in ROWS"
    return max(found)[1]


def allowed(row: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The row itself, the rows that it names, and the rows that these may import."""
    return {row}.union(*(allowed(row_of(named)) for named in ROWS[row]))


def imports(path: Path) -> set[str]:
    """The modules of this repository that a module imports, inside functions too."""
    names: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [(name.name,) for name in node.names]
        elif isinstance(node, ast.ImportFrom):  # a module of the package, or else a name inside the package
            names += [(f"{node.module}.{name.name}", str(node.module)) for name in node.names]
    files = [[n.replace(".", "/") + end for n in either for end in (".py", "/__init__.py")] for either in names]
    return {file for either in files for file in [f for f in either if (ROOT / f).is_file()][:1]}


IMPORTS = {
    str(path.relative_to(ROOT)): imports(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
}


def test_imports_follow_the_rows():
    pairs = [(file, other) for file, others in IMPORTS.items() for other in sorted(others)]
    assert [f"{file} imports {other}" for file, other in pairs if row_of(other) not in allowed(row_of(file))] == []


def test_no_circles():
    TopologicalSorter({file: found for file, found in IMPORTS.items() if not file.startswith("tests/")}).prepare()


def test_the_rows_forbid():
    assert row_of("codegen/store.py") not in allowed(row_of("cute_kernels/forward/kernel.py"))
    assert row_of("cute_kernels/forward/kernel.py") not in allowed(row_of("dualkv/ops/hopper.py"))
    assert row_of("cute_kernels/abi.py") in allowed(row_of("dualkv/ops/hopper.py"))
    assert row_of("dualkv/data/trees.py") not in allowed(row_of("dualkv/layout.py"))
    assert "dualkv/ops/hopper.py" in IMPORTS["dualkv/ops/backends.py"]
