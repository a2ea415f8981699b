"""The deployment's files agree with each other; .ci/run runs the script itself."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import store, toolchain
from codegen.spec import backward_specs

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def requirements() -> list[str]:
    lines = (DEPLOY / "requirements-runtime.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def closure(names: list[str]) -> set[str]:
    """Distributions that installing `names` brings, by what is installed here."""
    found: set[str] = set()
    while names:
        name = re.split(r"[^\w.-]", names.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        names += [need for need in needs if "extra ==" not in need]
    return found


def test_runtime_requirements_are_pinned_and_bring_no_compiler():
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    for name in requirements():
        assert name in pinned, name
    assert not [name for name in closure(requirements()) if "cutlass" in name]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    store.add(backward_specs("bf16", 64).postprocess, folder)
    return folder


def test_the_library_goes_with_its_licence(tmp_path):
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "runtime_library.py"), str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    library = f"nvidia_cutlass_dsl/{toolchain.flavour()}/lib/libcute_dsl_runtime.so"
    assert files == sorted(["nvidia_cutlass_dsl/LICENSE", library])
    assert (tmp_path / library).read_bytes() == toolchain.runtime_library().read_bytes()
    assert "NVIDIA Software License Agreement" in (tmp_path / "nvidia_cutlass_dsl" / "LICENSE").read_text()


def test_the_dockerfile_copies_what_exists_and_is_let_through():
    text = (DEPLOY / "Dockerfile").read_text()
    let_through = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    sources = [
        word for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in words.split()[:-1]
    ]
    assert {"constraints.txt", ".", "deploy/verify.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source == "." or any(fnmatch.fnmatch(source, f"{path}*") for path in let_through), source
    for path in let_through:
        assert (ROOT / path).exists(), path
    runtime = text.split(" AS runtime")[1]
    assert not re.search(r"cutlass|gcc", runtime)
    for stage in (text, (DEPLOY / "two_stages.sh").read_text()):
        for step in ("runtime_library.py", "requirements-runtime.txt", "verify.py", "dualkv precompile", "--no-deps"):
            assert step in stage, step


def test_verify_refuses_an_environment_with_the_compiler(kernels):
    def verify(**settings: str) -> str:
        done = subprocess.run(
            [sys.executable, str(DEPLOY / "verify.py")], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | settings,
        )  # fmt: skip
        assert done.returncode == 1
        return done.stderr.strip()

    assert verify(DUALKV_JIT="1", DUALKV_KERNEL_DIR=str(kernels)).startswith(
        "expected DUALKV_KERNEL_DIR to be the folder"
    )
    assert verify(DUALKV_JIT="0", DUALKV_KERNEL_DIR=str(kernels)).startswith("cutlass can be imported here")
