"""The distributions: what is in them, their metadata, the types that users see, and what a missing package says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import dualkv
from codegen import toolchain

ROOT = Path(__file__).parent.parent
PACKAGES = ("dualkv", "codegen", "cute_kernels")
SOURCES = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
SOURCES |= {"dualkv/py.typed", "codegen/runtime.c"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """(the source distribution, the wheel that was built from it)"""
    out = tmp_path_factory.mktemp("distributions")
    # From a copy: a build leaves files where it runs.
    copied = [*PACKAGES, "tests", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]
    source = out / "source"
    source.mkdir()
    for name in copied:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "Deprecat" not in built.stderr
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


# ---------------------------------------------------------------- contents
def test_the_wheel_has_the_packages_and_nothing_else(distributions):
    names = zipfile.ZipFile(distributions[1]).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == SOURCES
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_distribution_builds_the_wheel_and_tells_its_story(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    own = {name for name in names if not name.startswith("dualkv.egg-info/")}
    beside = {"pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", "setup.cfg"}
    assert own == SOURCES | beside


def test_metadata(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        about = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(about).decode())
        entry_points = wheel.read(about.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Version"] == dualkv.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {
        "compile",
        "transformers",
        "openrlhf",
        "skyrl",
        "swift",
        "trl",
        "megatron",
        "verl",
        "hybrid",
        "cudnn",
        "bench",
        "dev",
    }
    assert "dualkv = dualkv.__main__:main" in entry_points
    assert "dualkv = dualkv.integrations.verl" in entry_points


def test_changelog_and_citation_know_the_version():
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0].startswith(f"{dualkv.__version__}, ")
    cited = re.search("^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited[1] == dualkv.__version__


# ---------------------------------------------------------------- types
def test_a_program_that_uses_it_is_checked_strictly(distributions, tmp_path):
    """The program is checked against the wheel, in an environment of its own."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here, there = (
        Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
        for python in (sys.executable, str(environment / "bin" / "python"))
    )
    zipfile.ZipFile(distributions[1]).extractall(there)
    for package in ("torch", "numpy", "typing_extensions.py"):  # whose types ours are made of
        (there / package).symlink_to(here / package)
    shutil.copy(ROOT / "tests" / "files" / "consumer.py", tmp_path)  # next to no sources of ours
    # Parts of PyTorch that no type of ours is made of: without them the check takes a third of the time.
    parts = ("_inductor", "_dynamo", "ao", "onnx", "_functorch", "_export", "export")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n" + "".join(f"[mypy-torch.{part}.*]\nfollow_imports = skip\n" for part in parts)
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(environment / "bin" / "python"),
         "--config-file", "mypy.ini", "consumer.py"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


# ---------------------------------------------------------------- what is not installed
WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None  # as if it were not installed
{program}
"""
ATTENTION = """
import torch, dualkv
layout = dualkv.Layout.from_lengths([5], [[3, 2]])
q, k, v = torch.randn(3, layout.num_tokens, 2, 16, requires_grad=True).unbind()
dualkv.attention(q, k, v, layout).sum().backward()
print("computed")
"""
COMMAND = "sys.argv[0] = 'dualkv'  # as pip's script\nfrom dualkv.__main__ import main\nmain()"


def without(names, program, *args, **environment):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(program=program), names, *args], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip


def test_attention_needs_none_of_the_others():
    others = "cutlass,triton,transformers,rich,typer,matplotlib,trl,verl,megatron,pynvml,tvm_ffi,cuda"
    assert without(others, ATTENTION).stdout == "computed\n"


MODEL = (
    "dualkv: dualkv.integrations.transformers needs transformers 5.5.3 or newer "
    "(not installed: pip install 'dualkv[transformers]')"
)
NEEDS = "dualkv: the command line needs {0} or newer (not installed: pip install '{1}')"


@pytest.mark.parametrize(
    ("names", "words", "says"),
    [
        ("rich", ["doctor"], NEEDS.format("rich 14", "rich>=14")),
        ("typer", ["doctor"], NEEDS.format("typer 0.20", "typer>=0.20")),
        ("transformers", ["demo"], MODEL),
    ],
)
def test_a_missing_package_is_one_sentence(names, words, says):
    done = without(names, COMMAND, *words)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [says]
    assert done.stdout.strip() == ""


def test_kernels_without_their_compiler(run, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_environment", lambda: "nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("DUALKV_CACHE_DIR", str(tmp_path))
    code, out, err = run("precompile", "--out", str(tmp_path / "k"), "--head-dims", "64", "--gqa", "1")
    assert (code, out.strip()) == (1, "")
    assert len(err.splitlines()) == 1
    for remedy in ("the wheel dualkv-kernels", "`pip install 'dualkv[compile]'`", "`dualkv toolchain install`"):
        assert remedy in err
