"""The command line; see the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from codegen import KernelError
from tools import filed
from tools.bench.record import OptionalJsonPath
from tools.ncu import collect, lines, metrics, show
from tools.ncu.job import Job, read_tile, read_workload

PLACES = 12  # hot ones that are shown

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
) -> None:
    """Profile one direction of a workload on this GPU."""
    try:
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
        groups = read_workload(workload, layout).with_shape(**shape)
        job = Job(groups, direction, deterministic, read_tile(tile or []))
        console = _console()
        with console.status(f"profiling {groups.name} {direction}: each kernel runs some 20 times"):
            collect.collect(job, out)
        console.print(show.report(metrics.read(out).to_dict()))
    except (collect.ProfileError, KernelError, ValueError, OSError) as e:
        _fail(e)


@app.command()
def report(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles: folders that `run` left.")],
    json_to: OptionalJsonPath = None,
    markdown: MarkdownOption = False,
) -> None:
    """What each kernel of a profile did with its time."""
    try:
        found = [metrics.read(folder) for folder in profiles]
        for profile in found:
            _print(show.report(profile.to_dict()), markdown)
        if json_to is not None:
            figures = {**found[0].environment, "profiles": [profile.to_dict() for profile in found]}
            json_to.write_text(filed.text(figures))
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
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Places a kernel.")] = PLACES,
    kernel: Annotated[
        str | None, typer.Option(help="One operation, such as bwd. Default: those with products.")
    ] = None,
    instructions: Annotated[bool, typer.Option("--instructions", help="By instruction rather than by line.")] = False,
    markdown: MarkdownOption = False,
) -> None:
    """Where warps wait: source lines (or instructions) with the most samples."""
    try:
        found = metrics.read(profile)
        chosen = [k for k in found.kernels if (k.operation == kernel if kernel else k.need.flops)]
        if not chosen:
            ran = ", ".join(one.name for one in found.kernels)
            raise ValueError(f"--kernel is {kernel!r}, this profile has {ran}")
        for one in chosen:
            places, why_not = lines.hot_of(profile, one.operation, one.symbol, limit, not instructions)
            _print(show.hot(one.name, places, why_not), markdown)
    except (ValueError, OSError) as e:
        _fail(e)


if __name__ == "__main__":
    app()
