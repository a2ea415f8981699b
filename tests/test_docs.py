"""The commands, code and links of README and docs work: every command is one that its program takes, down to its last
option, and those of SMALL run here in a small form; every block of Python runs; every link leads somewhere; generated
pages are current."""

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
# Targets of the Makefile that run in this environment: arguments, and what they print. Of the others `make -n` shows
# the recipe.
MADE = {
    "help": ("", "make test"),
    "demo": (SMALL["dualkv demo"], "EXACT TO ROUNDING"),
}
FOREIGN = ("pre-commit", "echo", "swift")  # programs of others
CONSTRAINTS = ROOT / "constraints.txt"
pytestmark = pytest.mark.usefixtures("one_thread")
SHOWN = sorted(set(shown()))


# ---------------------------------------------------------------- the site
def test_the_site_builds_without_a_warning(tmp_path):
    """Pages that the navigation lacks, and links or anchors that lead nowhere, are warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "docs/" not in "".join(re.findall("<img[^>]*>", (tmp_path / "overview/index.html").read_text()))
    api = (tmp_path / "api/index.html").read_text()
    assert [name for name in dualkv.__all__ if name not in api] == []
    assert 'href="api/"' in (tmp_path / "index.html").read_text(), "a link to the package leads to that page"


# ---------------------------------------------------------------- commands
def words_of_pip(words):
    """List what is wrong with a `pip install` or `uninstall` of files or packages: pins are those of
    constraints.txt."""
    pins = {r.name: r for r in map(Requirement, re.findall(r"^[^#\s].*$", CONSTRAINTS.read_text(), re.MULTILINE))}
    given = [word for word in words[2:] if not word.startswith("-")]
    asked = [Requirement(word) for word in given if not word.endswith(".whl")]
    wrong = [] if words[1] in ("install", "uninstall") and given else [" ".join(words)]
    for one in asked:
        if one.specifier and (one.name not in pins or one.specifier != pins[one.name].specifier):
            wrong.append(f"{one}, in constraints.txt {pins.get(one.name)}")
    return wrong


def check_options(words, whole):
    """Check that a program of this repository takes a command. A page may name a program alone (`whole` is False)."""
    if words[0] == "python":
        file = words[1] if words[1] != "-m" else f"{words[2].replace('.', '/')}.py"
        paths = [path for path in (ROOT / file, ROOT / file.removesuffix(".py") / "__main__.py") if path.exists()]
        if not paths and not (ROOT / file.partition("/")[0]).exists():
            return  # a module of another library
        if not re.search(r"argparse|typer|options\(", paths[0].read_text()):
            assert words[3:] == [], f"{file} takes no options"
            return
    try:
        parse(words if whole or len(words) > 3 else [*words, "--help"])
    except ModuleNotFoundError as missing:  # such programs are parsed where that library is installed
        if (ROOT / str(missing.name).partition(".")[0]).exists():
            raise


@pytest.mark.parametrize(("page", "command", "whole"), SHOWN)
def test_commands(page, command, whole, run, compiles, monkeypatch, tmp_path):
    words = words_of(command)
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif words[:2] == ["pip", "install"] and (ours := [w for w in words if re.match(r"(dualkv|\.)(\[|$)", w)]):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\w+", ours[0].partition(" @ ")[0])) - {"dualkv"} <= set(extras)
    elif words[0] == "pip":  # changes the environment: not run
        assert words_of_pip(words) == []
    elif words[0] == "export":
        sources = "".join(p.read_text() for p in (ROOT / "codegen").glob("*.py"))
        assert all(f'"{word.partition("=")[0]}"' in sources for word in words[1:])
    elif words[0] == "ncu":  # what it runs is ours
        check_options(words_of(" ".join(words[words.index("python") :])), whole)
    elif words[0] in ("dualkv", "python"):
        check_options(words, whole)
        small = SMALL.get(" ".join(words[:2]))
        if whole and small is not None and "--check" not in words:
            monkeypatch.chdir(tmp_path)
            # Stand-ins for compiled kernels have no registers.
            monkeypatch.setattr("codegen.precompiled.write_manifest", lambda *_: {})
            monkeypatch.setattr("dualkv.cli.precompile.rows", lambda result: [])
            code, _, err = run(*words[1:], *small.split())
            assert code == 0, err
    else:
        script = words[1] if words[0] == "bash" else words[0]
        assert script in FOREIGN or (ROOT / script).is_file(), f"{page} shows `{command}`, and there is no {script}"


@pytest.mark.parametrize("target", MADE)
def test_targets_of_the_makefile_run(target):
    """The targets run with the recipes as they are."""
    arguments, printed = MADE[target]
    settings = [f"BIN={Path(sys.executable).parent}", f"ARGS={arguments}"]
    command = ["make", "--old-file", ".venv/.installed", *settings, target]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_the_options_of_precompile_are_those_of_the_page():
    rows = re.findall(r"^\| `(-[^`]*)` \|", PAGES["deployment.md"].read_text(), re.MULTILINE)
    listed = {word for row in rows for word in re.findall(r"(?:^| )(--?[a-z][\w-]*)", row)}
    command = typer.main.get_command(commands.app).commands["precompile"]
    taken = {max(option.opts, key=len) for option in command.params}
    short = {option.opts[-1]: max(option.opts, key=len) for option in command.params}
    assert {short.get(word, word) for word in listed} == taken - {"--out", "--check", "--debug", "--help"}


@pytest.mark.parametrize("page", ["README.md", "trees.md"])
def test_lines_of_configuration_are_those_of_the_page_on_verl(page):
    """Lines of configuration are compared with veRL's own where veRL is installed:
    tests/integrations/verl/test_configuration.py."""
    lines = [line for block in blocks(page, {"text"}) for line in block.splitlines() if re.match(r"\+?[\w.]+=", line)]
    assert lines
    table = PAGES["verl.md"].read_text().partition("| line | what it does |")[2].partition("\n\n")[0]
    shell = "\n".join(blocks("verl.md", COMMANDS))
    assert [line for line in lines if f"`{line}`" not in table and line not in shell] == []


# ---------------------------------------------------------------- Python
def prepared(page):
    """Make the names that the blocks of a page use without defining them."""
    from tests.integrations.tiny import VOCAB, make_model

    torch.manual_seed(0)
    if page == "README.md":
        return {}  # its blocks run as they stand
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


def _experts():
    """A mixture of experts, sequences and their recorded routes: [tokens, layers, experts of a token]."""
    from tests.integrations.tiny import EXPERTS, make_model

    moe = dualkv.integrations.transformers.enable(make_model("qwen3_moe"))
    sequences = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 11]]
    shape = moe.config.num_hidden_layers, EXPERTS["num_experts_per_tok"]
    return {"moe": moe, "sequences": sequences, "recorded": [torch.arange(2).expand(len(s), *shape) for s in sequences]}


PREPARED = {"migration.md": _others, "transformers.md": _experts}
NOT_HERE = {"trl.md", "megatron.md"}  # test_docs.py of integrations, where their library is
WITH_PYTHON = [page for page in PAGES if blocks(page, {"python"}) and page not in NOT_HERE]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert ran(page)


def ran(page):
    """Run the blocks of a page; returns the names that they define."""
    space = prepared(page)
    for block in blocks(page, {"python"}):
        exec(compile(block.replace('"cuda"', '"cpu"'), page, "exec"), space)
    return space


def test_python_of_the_readme_computes_what_it_says():
    (line,) = [block for block in blocks("README.md", {"text"}) if block.startswith("from ")]
    assert line.strip() in blocks("trl.md", {"python"})[0], "which runs where TRL is"
    space = ran("README.md")
    assert [len(row) for row in space["rows"]] == [128, 90, 64, 128, 130, 91]
    assert space["out"].shape == (512 + 8 * 128 + 70 + 130 + 91, 16, 128)


def test_python_of_the_migration_page_computes_what_it_says():
    space = ran("migration.md")
    assert space["out"].shape == space["q"].shape
    assert torch.equal(space["mask"], space["completion_mask"].bool())
    assert space["logp"].shape == space["completion_ids"].shape


def rows_of(library, pairs, width):
    """sequences, attention_mask [B, L] and the mask of trained tokens, in the columns in which a library has them.

    In the responses a tool's answer of 3 tokens does not count."""
    rows = torch.zeros(3, len(pairs), width, dtype=torch.int64)
    for i, (prompt, response) in enumerate(pairs):
        tokens = torch.cat([prompt, response])
        n = len(tokens)
        columns = {
            "OpenRLHF": range(n),
            "SkyRL": range(width - n, width),
            "prime-rl": [*range(2, 11), *range(14, n + 5)],
        }
        at = torch.tensor(columns[library])
        trained = torch.tensor([*range(len(prompt), n - 6), *range(n - 3, n)])
        rows[0, i, at], rows[1, i, at], rows[2, i, at[trained]] = tokens, 1, 1
    longest = max(len(response) for _, response in pairs)
    first = {"OpenRLHF": 1, "SkyRL": width - longest, "prime-rl": 0}[library]
    return rows[0], rows[1], rows[2, :, first:]


@pytest.mark.parametrize("page", ["trainer.md", "fsdp.md"])
@pytest.mark.parametrize("library", ["OpenRLHF", "SkyRL", "prime-rl"])
def test_padded_batches_are_those_of_separate_sequences(page, library):
    """Log-probs, in their columns, and gradients are those of each sequence alone. A prompt's tokens run once."""
    space = ran(page)
    model, draw = space["model"], torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 90, (n,), generator=draw) for n in (40, 13) for _ in range(4)]
    pairs = [(prompts[i - i % 4], torch.randint(1, 90, (7 + i % 4,), generator=draw)) for i in range(8)]
    sequences, own, trained = rows_of(library, pairs, 55)
    computed = []
    model.model.register_forward_pre_hook(
        lambda _, args, kw: computed.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    if page == "fsdp.md":
        logp = space["Actor"](model)(sequences, own, trained)
    else:
        logp, entropy = space["padded_logprobs"](sequences, own, trained)
        assert ((entropy > 0) == (trained > 0)).all()
    assert computed == [40 + 13 + 2 * (7 + 8 + 9 + 10)]
    assert computed[0] < 0.45 * int(own.sum())

    expected = torch.zeros(sequences.shape)
    for i, mask in enumerate(own.bool()):
        alone = model(input_ids=sequences[i : i + 1, mask]).logits[0, :-1].log_softmax(-1)
        expected[i, mask.nonzero()[1:, 0]] = alone.gather(1, sequences[i, mask][1:, None])[:, 0]
    expected = expected[:, -trained.shape[1] :] * trained
    assert trained.sum() == sum(len(response) - 3 for _, response in pairs)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    weights, parameters = torch.linspace(-1, 2, logp.numel()).view(logp.shape), list(model.parameters())
    found, want = (torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True) for x in (logp, expected))
    for name, a, b in zip(dict(model.named_parameters()), found, want, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-6)


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


def test_messages_that_the_page_on_errors_quotes_are_in_the_program():
    """Literals of Python and veRL's settings in between are left out: `...` on the page."""
    sources = "".join(p.read_text() for folder in ("dualkv", "codegen") for p in (ROOT / folder).rglob("*.py"))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", sources)
    text = PAGES["troubleshooting.md"].read_text().partition("## An error")[2]
    quoted = [q for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for q in re.findall("`([^`]+)`", row)]
    said = [part for q in quoted if " " in q and not q.startswith("dualkv ") for part in q.split(" ... ")]
    assert len(said) > 8
    assert [part for part in said if part not in joined] == []


def test_every_page_is_reached_from_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)", PAGES["index.md"].read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_paths_in_documents_exist():
    """Files of this repository that a page names in backticks, as seen from its root."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = {
        (name, path)
        for name, page in PAGES.items()
        for path in re.findall(r"`(?:\.\./)?((?:[\w.-]+/)+[\w.-]+\.\w+)`", page.read_text())
        if path.split("/")[0] in folders - {"build"}
    }
    assert [one for one in sorted(named) if not (ROOT / one[1]).exists()] == []
    assert len(named) > 40
