"""Every command of README, docs and programs' own words runs here in a small form, or is named below with the reason
why it cannot and is parsed to its last option; every block of Python runs; every link leads somewhere; generated pages
are current.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
import typer
from packaging.requirements import Requirement

import dualkv
from dualkv.cli import commands
from tests.documents import COMMANDS, FENCE, PAGES, ROOT, blocks, parse, shown, words_of
from tools import drawings

# What makes a command small: options behind its own, of which the last ones count.
SMALL = {
    "dualkv bench": "--list",
    "dualkv demo": "--device cpu --steps 1 --prompt-len 40 --responses 2 --response-len 8",
    "dualkv doctor": "",
    "dualkv precompile": "",
}
# Targets of the Makefile, in this environment: recipes and what they start. Of the others `make -n` shows the recipe.
MADE = {
    "help": "",
    "demo": SMALL["dualkv demo"],
    "fuzz": "--cases 2 --device cpu --seed 0",
}
NOT_MADE = {
    "bench-cpu": "overwrites a record, in minutes: python -m tools.bench_update below",
    "check-kernels": "compiles every kernel: tests/codegen/test_manifest.py compares a part",
    "clean": "removes environments",
    "constraints": "overwrites constraints.txt with what is installed",
    "format": "writes sources: `make test` asks whether it would",
    "lint": "is a part of `make test`: .ci/run",
    "manifest": "compiles every kernel: tests/codegen/test_manifest.py compares a part",
    "test": "is what runs this test: .ci/run",
    "test-gpu": "needs a Hopper GPU",
    "test-trl": "makes an environment: .ci/run",
    "test-verl": "makes an environment: .ci/run",
}
# Why a command is not run here; it is parsed by its own program.
NOT_RUN = {
    "dualkv toolchain install": "downloads a compiler where there is none: tests/codegen/test_private.py",
    "dualkv precompile --check": "looks at machine code: tests/cli/test_precompile.py makes and checks some",
    "python examples/four_gpus.py": "tests/test_examples.py runs it in small",
    "python examples/long_context.py": "tests/test_examples.py runs it in small",
    "python examples/one_gpu.py": "tests/test_examples.py runs it in small",
    "python -m tests.fuzz": "takes minutes: tests/fuzz/test_fuzz.py runs a few cases",
    "python -m tests.protocol": "takes an hour: tests/protocol/test_protocol.py runs fewer schedules",
    "python -m tools.before": "needs a Hopper GPU: tests/tools/test_before.py has what does not",
    "python -m tools.bench_update": "has the record's sizes: minutes, or a Hopper GPU",
    "python -m tools.bench_step": "needs a Hopper GPU",
    "python -m tools.cold_start": "needs a Hopper GPU",
    "python -m tools.host_time": "needs a Hopper GPU",
    "python -m tools.ncu": "needs a Hopper GPU and Nsight Compute: tests/tools/test_ncu.py reads filed profiles",
    "python -m tools.record": "needs a Hopper GPU",
    "python -m tools.tune": "needs a Hopper GPU: tests/tools/test_tune.py has what does not",
    "python -m tools.sanitize": "needs a Hopper GPU and compute-sanitizer",
    "python -m tools.soak": "needs a Hopper GPU: tests/tools/test_soak.py judges what it records",
}
# What writes documents and takes no options, and the test that compares what it would write.
WRITES = {
    "python -m tools.api": "tests/tools/test_api.py",
    "python -m tools.drawings": "tests/test_docs.py",
    "python -m tools.tables": "tests/tools/test_tables.py",
}
# What needs an environment of its own: the tests there that run or parse it.
ELSEWHERE = {
    "bash examples/verl_dapo.sh": "tests/integrations/verl/test_examples.py",
    "bash examples/verl_grpo.sh": "tests/integrations/verl/test_examples.py",
    "python -m tools.bench_trl": "tests/integrations/trl/test_docs.py",
    "python -m tools.bench_verl": "tests/integrations/verl/test_docs.py",
    "python -m tools.train_verl": "tests/integrations/verl/test_docs.py",
    "python -m verl.trainer.main_ppo": "tests/integrations/verl/test_docs.py",
}
CONSTRAINTS = ROOT / "constraints.txt"
pytestmark = pytest.mark.usefixtures("one_thread")
SHOWN = sorted(set(shown()))


def known(names, words):
    """The longest of `names` that a command begins with; an option of a name may stand anywhere."""

    def fits(name):
        start = [w for w in name.split() if not w.startswith("--")]
        return words[: len(start)] == start and set(name.split()) <= set(words)

    return max(filter(fits, names), key=len, default=None)


# ---------------------------------------------------------------- commands
def words_of_pip(words):
    """What is wrong with a `pip install` or `uninstall` of files or packages: pins are those of constraints.txt."""
    pins = {r.name: r for r in map(Requirement, re.findall(r"^[^#\s].*$", CONSTRAINTS.read_text(), re.MULTILINE))}
    given = [word for word in words[2:] if not word.startswith("-")]
    asked = [Requirement(word) for word in given if not word.endswith(".whl")]
    wrong = [] if words[1] in ("install", "uninstall") and given else [" ".join(words)]
    for one in asked:
        if one.specifier and (one.name not in pins or one.specifier != pins[one.name].specifier):
            wrong.append(f"{one}, in constraints.txt {pins.get(one.name)}")
    return wrong


@pytest.mark.parametrize(("page", "command", "whole"), SHOWN)
def test_commands(page, command, whole, run, compiles, monkeypatch, tmp_path):
    words = words_of(command)
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        targets = {word for word in words[1:] if "=" not in word}
        assert targets <= {*MADE, *NOT_MADE}, (
            f"{page} shows `{command}`: make it small (MADE), or say why not (NOT_MADE)"
        )
    elif words[:2] == ["pip", "install"] and (ours := [w for w in words if re.match(r"dualkv(\[|$)|\.\[", w)]):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\w+", ours[0])) - {"dualkv"} <= set(extras)
    elif words[0] == "export":
        sources = "".join(p.read_text() for p in (ROOT / "codegen").glob("*.py"))
        assert all(f'"{word.partition("=")[0]}"' in sources for word in words[1:])
    elif (ROOT / words[0]).is_file():  # .ci/run, which every commit passes, runs our scripts
        assert words[0].rpartition("/")[2] in (ROOT / ".ci" / "run").read_text()
    elif words[0] == "pip":  # changes the environment: not run
        assert words_of_pip(words) == []
    elif words[0] == "ncu":  # needs a GPU, and what it runs is ours
        parse(words_of(" ".join(words[words.index("python") :])))
    elif name := known(ELSEWHERE, words):
        assert (ROOT / ELSEWHERE[name]).exists()
    elif name := known(WRITES, words):
        assert words == name.split()
        assert name.split()[-1].rpartition(".")[2] in (ROOT / WRITES[name]).read_text()
    elif known(NOT_RUN, words):
        parse(words if whole or len(words) > 3 else [*words, "--help"])  # a page may name a program alone
    else:
        small = known(SMALL, words)
        assert small, f"{page} shows `{command}`: run it (SMALL), or say why not (NOT_RUN, ELSEWHERE)"
        parse(words)
        if not whole:
            return
        monkeypatch.chdir(tmp_path)
        if small == "dualkv precompile":
            monkeypatch.setattr("codegen.precompiled.write_manifest", lambda *_: {})  # stand-ins have no registers
            monkeypatch.setattr("dualkv.cli.precompile.rows", lambda result: [])
        code, _, err = run(*words[1:], *SMALL[small].split())
        assert code == 0, err


@pytest.mark.parametrize("target", MADE)
def test_targets_of_the_makefile_run(target):
    """With the recipes as they are, and this environment in the place of the one that they would make."""
    settings = [f"BIN={Path(sys.executable).parent}", f"ARGS={MADE[target]}"]
    command = ["make", "--old-file", ".venv/.installed", *settings, target]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"help": "make test", "demo": "EXACT TO ROUNDING", "fuzz": "2 cases"}[target] in done.stdout


def test_reasons_are_of_commands_that_are_shown():
    words_shown = [words_of(command) for _, command, _ in SHOWN]
    for names in (NOT_RUN, ELSEWHERE, WRITES, SMALL):
        for name in names:
            assert any(known(names, words) == name for words in words_shown), f"no page shows {name}"
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*MADE, *NOT_MADE} == set(phony.split())


@pytest.mark.parametrize(
    "command",
    [
        "dualkv demo --step 3",
        "dualkv bench --rounds many",
        "dualkv benchmark",
        "python -m tools.ncu run x --warp 3",
        "python -m tests.fuzz --seconds soon",
        "python examples/one_gpu.py --steps few",
        "torchrun --nproc-per-node 2 examples/four_gpus.py --budgets 7",
    ],
)
def test_commands_that_no_program_takes_would_be_found(command, capsys):
    with pytest.raises(pytest.fail.Exception, match="is not taken"):
        parse(words_of(command))


@pytest.mark.parametrize(
    "command",
    [
        "pip instal torch",
        "pip install --no-deps",
        "pip install nvidia-cutlass-dsl-libs-cu13==4.8.0",
        "pip install x==1",
    ],
)
def test_commands_of_pip_that_are_wrong_would_be_found(command):
    assert len(words_of_pip(command.split())) == 1


def test_the_options_of_precompile_are_those_of_the_page():
    rows = re.findall(r"^\| `(-[^`]*)` \|", PAGES["deployment.md"].read_text(), re.MULTILINE)
    listed = {word for row in rows for word in re.findall(r"(?:^| )(--?[a-z][\w-]*)", row)}
    command = typer.main.get_command(commands.app).commands["precompile"]
    taken = {max(option.opts, key=len) for option in command.params}
    short = {option.opts[-1]: max(option.opts, key=len) for option in command.params}
    assert {short.get(word, word) for word in listed} == taken - {"--out", "--check", "--debug", "--help"}


@pytest.mark.parametrize("page", ["README.md", "trees.md"])
def test_lines_of_configuration_are_those_of_the_page_on_verl(page):
    """Which are held to veRL's own configuration, where veRL is: tests/integrations/verl/test_configuration.py."""
    lines = [line for block in blocks(page, {"text"}) for line in block.splitlines() if re.match(r"\+?[\w.]+=", line)]
    assert lines
    table = PAGES["verl.md"].read_text().partition("| line | what it does |")[2].partition("\n\n")[0]
    shell = "\n".join(blocks("verl.md", COMMANDS))
    assert [line for line in lines if f"`{line}`" not in table and line not in shell] == []


# ---------------------------------------------------------------- Python
def prepared(page):
    """What the blocks of a page take for given."""
    from tests.integrations.tiny import VOCAB, make_model

    torch.manual_seed(0)
    space = {
        "dualkv": dualkv,
        "torch": torch,
        "model": make_model("qwen3"),
        "prompts": [torch.randint(0, VOCAB, (n,)) for n in (9, 4)],
        "responses": [[torch.randint(0, VOCAB, (n,)) for n in lens] for lens in ((3, 5, 1), (7,))],
    }
    return space | PREPARED.get(page, dict)()


def _others():
    """The paper's function: a context of 6 tokens, sequences of 3, 2 and 4, the first of which asks for both parts.

    PrefixGrouper: padded prompts, one a group, and completions.
    """
    p, r = 6, (3, 2, 4)
    cu_q, cu_k = (torch.tensor(sums, dtype=torch.int32) for sums in ([0, 9, 11, 15], [0, 3, 5, 9]))
    q, kc, vc, kd, vd = (torch.randn(n, 2, 16) for n in (15, p, p, 9, 9))
    names = {"k_context": kc, "v_context": vc, "k_decoded": kd, "v_decoded": vd, "cu_seqlens_q": cu_q}
    more = {"cu_seqlens_k_decoded": cu_k, "max_seqlen_q": 9, "context_seqlen": p, "max_seqlen_k_decoded": 4}
    packed = {"P": p, "R_0": r[0], "R_1": r[1], "R_2": r[2], "k": torch.cat([kc, kd]), "v": torch.cat([vc, vd])}
    padded = {
        "prompt_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[4, 0], [2, 3], [5, 6]]),
        "completion_mask": torch.tensor([[1, 0], [1, 1], [1, 1]]),
    }
    return {"q": q, **names, **more, **packed, **padded}


PREPARED = {"migration.md": _others}
NOT_HERE = {"api.md", "trl.md"}  # signatures; tests/integrations/trl/test_docs.py, where TRL is
WITH_PYTHON = [page for page in PAGES if blocks(page, {"python"}) and page not in NOT_HERE]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert ran(page)


def ran(page):
    """What the blocks of a page leave behind."""
    space = prepared(page)
    for block in blocks(page, {"python"}):
        exec(compile(block.replace('"cuda"', '"cpu"'), page, "exec"), space)
    return space


def test_python_of_the_readme_computes_what_it_says():
    (line,) = [block for block in blocks("README.md", {"text"}) if block.startswith("from ")]
    assert line.strip() in blocks("trl.md", {"python"})[0], "which runs where TRL is"
    space = ran("README.md")
    assert [len(row) for row in space["rows"]] == [3, 5, 1, 7]
    assert space["out"].shape == (512 + 8 * 128 + 70 + 130 + 91, 16, 128)


def test_python_of_the_migration_page_computes_what_it_says():
    space = ran("migration.md")
    assert space["out"].shape == space["q"].shape
    assert torch.equal(space["mask"], space["completion_mask"].bool())
    assert space["logp"].shape == space["completion_ids"].shape


# ---------------------------------------------------------------- the rest of a page
@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_and_links_lead_somewhere(page):
    text = PAGES[page].read_text()
    languages = {language for language, _ in FENCE.findall(text)}
    assert languages <= COMMANDS | {"python", "text", "yaml"}, languages
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (PAGES[page].parent / unquote(path)).resolve() if path else PAGES[page]
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}, target


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_pictures_are_current(name):
    assert (drawings.DOCS / name).read_text() == drawings.PICTURES[name](), "run `python -m tools.drawings`"


def test_every_page_is_reached_from_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)", PAGES["index.md"].read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
