"""No code comes from data: what the sources may not call, and what they depend on."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCES = [
    p for folder in ("dualkv", "codegen", "cute_kernels", "tools") for p in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {  # module.function
    "torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load", "os.system", "os.popen",
    "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
# Machine code by a path that is computed: compiled kernels, from folders that the store has checked.
LOADERS = {"ctypes.CDLL", "tvm_ffi.load_module"}
MAY_LOAD = {"codegen/store.py"}
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)  # in a file of requirements
# Of the extra `dev`: programs without which the CPU suite runs too.
NOT_FOR_TESTS = ("pytest-xdist", "uv", "ruff")


def dotted(node):
    """`a.b.c` of an expression of names and attributes, or None."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def findings(source, name):
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found += [f"imports {m}" for m in modules if m.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            computed = called in LOADERS and not all(isinstance(a, ast.Constant) for a in node.args)
            if called in BUILTINS | ATTRIBUTES or (computed and name not in MAY_LOAD):
                found.append(f"calls {called} in line {node.lineno}")
            shell = [k for k in node.keywords if k.arg == "shell" and getattr(k.value, "value", True) is not False]
            if shell:
                found.append(f"passes shell= in line {node.lineno}")
            remote = [k for k in node.keywords if k.arg == "trust_remote_code" and getattr(k.value, "value", True)]
            if remote:
                found.append(f"passes trust_remote_code= in line {node.lineno}")
    return found


def test_sources_make_no_code_of_data():
    found = {name: findings(p.read_text(), name) for p in SOURCES for name in [str(p.relative_to(ROOT))]}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_is_installed_fits_the_bounds():
    """Everything that `make` installs (constraints.txt; files of their own for some extras) is within the bounds of
    pyproject.toml.

    It does not install what `hybrid` and `cudnn` add: those kernels need a GPU.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    on_gpus = "hybrid", "cudnn"
    extras = {name: extra for name, extra in project["optional-dependencies"].items() if name not in on_gpus}
    needs = [(of, Requirement(r)) for of, extra in {"": project["dependencies"], **extras}.items() for r in extra]
    assert all(Requirement(r).specifier for name in on_gpus for r in project["optional-dependencies"][name])
    files = {path.parent.name: path for path in (ROOT / "tests" / "integrations").glob("*/requirements.txt")}
    pins = {
        of: {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in PIN.findall(path.read_text())}
        for of, path in {**files, "": ROOT / "constraints.txt"}.items()
    }
    for of, requirement in needs:
        if requirement.name == project["name"]:  # one extra within another
            continue
        assert requirement.specifier, f"{requirement.name} has no lower bound"
        name = requirement.name.lower()
        pinned = pins.get(of, {}).get(name) or pins[""].get(name)
        assert pinned, f"what make installs does not pin {name}"
        assert requirement.specifier.contains(pinned), f"{requirement} and its pin {pinned}"


def test_the_lowest_versions_are_the_bounds():
    """The pins of tests/lowest.txt are no higher than the lower bounds of the package and of what its CPU tests
    need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["bench"], *extras["dev"], *extras["transformers"], *extras["compile"]]
    needs = {r.name: r for r in map(Requirement, asked) if r.name not in (project["name"], *NOT_FOR_TESTS)}
    text = (ROOT / "tests" / "lowest.txt").read_text().replace("[cu13]", "")
    pins = dict(PIN.findall(text))
    assert pins.keys() == needs.keys()
    for requirement in needs.values():
        (lowest,) = (part.version for part in requirement.specifier if part.operator == ">=")
        assert f"{pins[requirement.name]}.".startswith(f"{lowest}."), requirement
