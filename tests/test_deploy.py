"""The deployment's files agree with each other; .ci/run runs the script itself."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import dualkv
from codegen.spec import backward_specs, forward_spec
from dualkv.ops import hopper
from tests.codegen.real import copied

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


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


def test_what_dualkv_needs_brings_no_compiler():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = closure(list(project["dependencies"]))
    assert {"torch", "numpy", "apache-tvm-ffi", "typer", "rich"} <= needs
    assert not [name for name in needs if "cutlass" in name]
    assert "nvidia-cutlass-dsl" in closure(list(project["optional-dependencies"]["compile"]))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    copied(backward_specs("bf16", 64).postprocess, folder)
    return folder


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
    assert not re.search(r"cutlass|gcc|compile\]", runtime)
    for stage in (text, (DEPLOY / "two_stages.sh").read_text()):
        for step in ("[compile]", "--wheel", "verify.py", "dualkv precompile", "DUALKV_JIT=0"):
            assert step in stage, step


def test_verify_refuses_an_environment_with_the_compiler(kernels, monkeypatch):
    def verify(jit: str, folder: object) -> str:
        monkeypatch.setenv("DUALKV_JIT", jit)
        monkeypatch.setenv("DUALKV_KERNEL_DIR", str(folder))
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(DEPLOY / "verify.py"), run_name="__main__")
        return str(caught.value)

    for settings in (("1", kernels), ("0", "")):
        assert verify(*settings) == "expected the wheel dualkv-kernels or DUALKV_KERNEL_DIR, and DUALKV_JIT to be 0"
    assert verify("0", kernels).startswith("cutlass can be imported here")


@pytest.mark.parametrize(
    ("head_dim", "features", "few_keys"),
    [(64, (), False), (64, ("sinks",), False), (64, ("sinks", "softcap"), False), (96, (), False), (96, (), True)],
    ids=str,
)
def test_verify_runs_a_kernel_as_what_it_is(head_dim, features, few_keys, monkeypatch):
    """Other calls would ask for kernels that the folder need not have."""
    asked, chosen = [], []

    def attention(q, k, v, layout, own=dualkv.attention, **options):
        asked.append({name for name, value in options.items() if value is not None})
        heads, kv_heads = q.shape[1], k.shape[1]
        chosen.append(hopper.few_keys_forward(layout._segments, head_dim, heads // kv_heads, kv_heads))
        chosen.append(hopper.few_keys_backward(layout._segments, kv_heads, None))
        return own(q, k, v, layout, **options)

    verify = runpy.run_path(str(DEPLOY / "verify.py"))
    spec = forward_spec("bf16", head_dim, 2, features=features, few_keys=few_keys)
    monkeypatch.setattr(dualkv, "attention", attention)
    assert verify["run"](spec, bool(features), "cpu") < 2e-2
    assert asked == [set(features)] * 2
    assert verify["of_few_keys"](spec) == few_keys
    assert chosen == [few_keys] * 4
    assert {name for one in verify["backward_of"](spec) for name in one.features} == set(features)


def test_ci_resolves_what_the_page_installs_beside_vllm_and_sglang():
    """Each such line of docs/install.md, and no other."""
    page = (ROOT / "docs" / "install.md").read_text()
    shown = {line for line in re.findall(r"`pip install ([^`]*)`", page) if "vllm" in line or "sglang" in line}
    given = re.search(r"<<'END'\n(.*?)\nEND\n", (ROOT / ".ci" / "run").read_text(), re.DOTALL)[1]
    lines = {f".{line.partition(' ')[2]}".replace(".[]", ".") for line in given.splitlines()}  # behind a Python version
    assert {line.replace("'", "") for line in shown} == lines
    assert len(lines) == 7
