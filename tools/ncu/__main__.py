"""The command line; see the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from codegen import KernelError
from tools.ncu import collect, lines, metrics, show
from tools.ncu.job import Job, read_tile, read_workload

app = typer.Typer(help="Kernels under Nsight Compute.", no_args_is_help=True, add_completion=False)
Folder = Annotated[Path, typer.Argument(help="A profile: the folder that `run` left.")]

MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


def _fail(error: Exception) -> NoReturn:
    """One sentence, and a non-zero exit."""
    print(f"ncu: {error}", file=sys.stderr)
    raise typer.Exit(1) from None


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def _print(table: Table, markdown: bool) -> None:
    if markdown:
        print(show.markdown(table) + "\n")
    else:
        _console().print(table)


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="Folder of the profile; it is made.")],
    workload: Annotated[str | None, typer.Option("--workload", "-w", help="A name, or '8192:32x512;700:130'.")] = None,
    layout: Annotated[
        Path | None, typer.Option(help='A saved layout: JSON {"offsets": [...], "parent": [...]}.')
    ] = None,
    direction: Annotated[str, typer.Option("--direction", "-d", help="fwd or bwd.")] = "fwd",
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads, instead of the workload's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads, likewise.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=8, help="Head dim, likewise.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp16, likewise.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The deterministic backward.")] = False,
    tile: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER: another tile than the table's.")] = None,
    commit: Annotated[str | None, typer.Option(help="Of this code, where git cannot tell.")] = None,
) -> None:
    """Profile one direction of a workload on this GPU."""
    try:
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
        groups = read_workload(workload, layout).with_shape(**shape)
        job = Job(groups, direction, deterministic, read_tile(tile or []))
        console = _console()
        with console.status(f"profiling {groups.name} {direction}: each kernel runs some 20 times"):
            collect.collect(job, out, commit)
        console.print(show.report(metrics.read(out)))
    except (collect.ProfileError, KernelError, ValueError, OSError) as e:
        _fail(e)


@app.command()
def report(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles: folders that `run` left.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline of all into this PNG.")] = None,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    markdown: MarkdownOption = False,
) -> None:
    """What each kernel of a profile did with its time."""
    try:
        found = [metrics.read(folder) for folder in profiles]
        for profile in found:
            _print(show.report(profile), markdown)
        if plot is not None:
            show.roofline(found, plot)
        if json_to is not None:
            figures: dict[str, Any] = {**found[0].environment, "profiles": [profile.to_dict() for profile in found]}
            json_to.write_text(json.dumps(figures, indent=1) + "\n")
    except (ValueError, OSError) as e:
        _fail(e)


@app.command()
def compare(a: Folder, b: Folder) -> None:
    """Two profiles side by side; green is better, red is worse."""
    try:
        _console().print(show.compare(metrics.read(a), metrics.read(b)))
    except (ValueError, OSError) as e:
        _fail(e)


@app.command()
def hot(
    profile: Folder,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Places a kernel.")] = 15,
    kernel: Annotated[
        str | None, typer.Option(help="One operation, such as bwd. Default: those with products.")
    ] = None,
    instructions: Annotated[bool, typer.Option("--instructions", help="By instruction rather than by line.")] = False,
    markdown: MarkdownOption = False,
) -> None:
    """Where warps wait: source lines (or instructions) with the most samples."""
    try:
        found = metrics.read(profile)
        samples = lines.read_samples((profile / "source.csv").read_text())
        known = json.loads((profile / "lines.json").read_text())
        chosen = [k for k in found.kernels if (k.operation == kernel if kernel else k.need.flops)]
        if not chosen:
            ran = ", ".join(map(show.kernel_name, found.kernels))
            raise ValueError(f"--kernel is {kernel!r}, this profile has {ran}")
        for one in chosen:
            entry = known[one.operation]
            why_not = "instructions asked for" if instructions else entry.get("why_not")
            places = {} if why_not else {int(at): (file, line) for at, (file, line) in entry["lines"].items()}
            _print(show.hot(one, lines.hot(samples.get(one.symbol, []), places, limit), why_not), markdown)
    except (ValueError, OSError) as e:
        _fail(e)


if __name__ == "__main__":
    app()
