"""The command line; see the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from codegen import KernelError
from dualkv.bench.workloads import parse
from tools import filed
from tools.bench.record import OptionalJsonPath
from tools.ncu import collect, metrics, show
from tools.ncu.job import Job, read_tile

app = typer.Typer(help="Kernels under Nsight Compute.", no_args_is_help=True, add_completion=False)


def _fail(error: Exception) -> NoReturn:
    """One sentence, and a non-zero exit."""
    print(f"ncu: {error}", file=sys.stderr)
    raise typer.Exit(1) from None


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="Folder of the profile; it is made.")],
    workload: Annotated[str, typer.Option("--workload", "-w", help="A name, or '8192:32x512;700:130'.")],
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
        groups = parse(workload).with_shape(**shape)
        job = Job(groups, direction, deterministic, read_tile(tile or []))
        console = _console()
        with console.status(f"profiling {groups.name} {direction}: each kernel runs some 20 times"):
            collect.collect(job, out)
        console.print(show.report(metrics.read(out)))
    except (collect.ProfileError, KernelError, ValueError, OSError) as e:
        _fail(e)


@app.command()
def report(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles: folders that `run` left.")],
    json_to: OptionalJsonPath = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Show where each kernel of a profile spent its time."""
    try:
        found = [metrics.read(folder) for folder in profiles]
        for profile in found:
            table = show.report(profile)
            print(show.markdown(table) + "\n") if markdown else _console().print(table)
        if json_to is not None:
            figures = {**found[0].environment, "profiles": [profile.to_dict() for profile in found]}
            json_to.write_text(filed.text(figures))
    except (ValueError, OSError) as e:
        _fail(e)


if __name__ == "__main__":
    app()
