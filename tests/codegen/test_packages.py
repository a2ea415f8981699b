"""Tests of the versions of other packages that serve, and of the metadata that asks for them."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from codegen import packages
from codegen.packages import PACKAGES, UNKNOWN, found, lacking, release, require

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)")


def test_the_metadata_asks_for_no_less():
    """Needed packages exactly; an extra may ask for a newer version than the lowest that serves."""
    needed = [p for p in PACKAGES.values() if p.needed]
    assert [p.install for p in needed] == [f"pip install '{line}'" for line in PROJECT["dependencies"]]
    for p in needed:
        assert f"{p.name}>={p.lowest}" in p.install
    told = {extra: p.name for p in PACKAGES.values() for extra in re.findall(r"dualkv\[(\w+)\]", p.install)}
    assert set(told) == set(EXTRAS) - {"dev"}
    for extra, name in told.items():
        asked = dict(match.groups() for line in EXTRAS[extra] if (match := REQUIREMENT.match(line)))
        lowest = PACKAGES[name].lowest
        assert lowest is not None
        assert release(asked[name]) >= release(lowest), extra
        if name != "transformers":
            assert asked[name] == lowest, extra


def test_releases_are_compared_by_their_numbers():
    ascending = ["0.9", "0.9.1", "0.16.1", "1", "1.29.0", "2.9.1", "2.11.0a0+nv26.2", "2.12"]
    assert sorted(map(release, ascending)) == [*map(release, ascending)]
    assert release("2.11.0a0+nv26.2") == release("2.11") == release("2.11.0.dev1") == (2, 11)
    assert release("0.1.15.post2") == (0, 1, 15)


@pytest.fixture
def site(monkeypatch, tmp_path):
    """Installs stand-ins of packages; nothing else is installed by their names."""

    def install(name, version=None, module=None, files=("__init__.py",)):
        folder = tmp_path.joinpath(*(module or PACKAGES[name].module).split("."))
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file).write_text("raise AssertionError('imported')\n")
        if version is not None:
            about = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.meta_path", [PathFinder])  # without the finder of an editable installation
    for module in [m for m in sys.modules if m.partition(".")[0] in ("trl", "megatron", "nvidia_cutlass_dsl")]:
        monkeypatch.delitem(sys.modules, module)
    return install


@pytest.mark.parametrize(
    ("version", "serves"),
    [("1.16", True), ("1.16.0", True), ("1.16.0.dev0", True), ("2.0", True), ("1.15.9", False), ("0.99", False)],
)
def test_versions(site, version, serves):
    site("trl", version)
    says = f"trl 1.16 or newer (found {version}: pip install 'dualkv[trl]')"
    assert (found("trl"), lacking("trl")) == (version, None if serves else says)
    if serves:
        require("trl", "it")
        return
    with pytest.raises(ImportError) as caught:
        require("trl", "it")
    assert str(caught.value) == f"it needs {says}"
    assert (type(caught.value), caught.value.name) == (ImportError, "trl")


def test_what_is_not_installed(site):
    says = "trl 1.16 or newer (not installed: pip install 'dualkv[trl]')"
    assert (found("trl"), lacking("trl")) == (None, says)
    site("trl", files=["notes.txt"])  # a folder of its name, as of a clone that the program was started beside
    assert lacking("trl") == says
    with pytest.raises(ModuleNotFoundError) as caught:
        require("trl", "it")
    assert (str(caught.value), caught.value.name) == (f"it needs {says}", "trl")


def test_a_clone_has_no_version(site):
    """Megatron-LM on PYTHONPATH: `megatron` is a folder without __init__.py."""
    site("megatron-core", module="megatron.training")
    assert found("megatron-core") is None
    site("megatron-core")
    assert (found("megatron-core"), lacking("megatron-core")) == (UNKNOWN, None)


def test_a_package_without_a_module_of_its_own(site):
    site("nvidia-cutlass-dsl", "4.8.1", files=[])
    assert found("nvidia-cutlass-dsl") == "4.8.1"


def test_a_version_with_a_known_fault_is_refused(monkeypatch):
    monkeypatch.setattr(packages, "found", lambda name: "0.2.0")
    says = "apache-tvm-ffi 0.1.9 or newer, below 0.2 (found 0.2.0: pip install 'apache-tvm-ffi>=0.1.9,<0.2')"
    assert lacking("apache-tvm-ffi") == says
    assert [p.name for p in PACKAGES.values() if p.below] == ["apache-tvm-ffi"], "no others"


def test_every_lowest_version_bounds(monkeypatch):
    """One number less does not serve, the version itself and any newer one do."""
    for name, package in PACKAGES.items():
        versions = {"99": package.below is None}
        if package.lowest is not None:
            parts = [int(n) for n in package.lowest.split(".")]
            while not parts[-1]:
                parts.pop()
            older = ".".join(map(str, [*parts[:-1], parts[-1] - 1, 99]))
            versions |= {package.lowest: True, older: False}
        for version, serves in versions.items():
            monkeypatch.setattr(packages, "found", lambda name, version=version: version)
            said = lacking(name)
            assert (said is None) == serves, (name, version)
            assert serves or (f"(found {version}: {package.install})" in said and package.wanted in said)
