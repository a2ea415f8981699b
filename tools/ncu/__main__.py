"""The command line; see the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from codegen import KernelError
from dualkv.bench.show import markdown_table
from dualkv.bench.workloads import parse
from tools import filed
from tools.bench.record import OptionalJsonPath
from tools.ncu import collect, metrics
from tools.ncu.job import Job, read_tile
from tools.process import ToolError

STALLS_SHOWN = 6
app = typer.Typer(help="Kernels under Nsight Compute.", no_args_is_help=True, add_completion=False)


def _fail(error: Exception) -> NoReturn:
    """Print one sentence and exit with an error."""
    print(f"ncu: {error}", file=sys.stderr)
    raise typer.Exit(1) from None


def table(profile: metrics.Profile) -> str:
    """Tabulate a profile: a line a figure, a column a kernel; then what warps wait for."""
    job, w, kernels = profile.job, profile.job.workload, profile.kernels
    heads = f"H={w.heads} Hk={w.kv_heads} D={w.head_dim} {w.dtype}"
    options = [f"{name}={value}" for name, value in job.tile.items()] + ["deterministic"] * job.deterministic
    rows = []
    for figure in metrics.FIGURES:
        values = [figure.of(kernel) for kernel in kernels]
        if any(value is not None for value in values):
            rows.append([figure.name, *("" if value is None else format(value, figure.form) for value in values)])
    for reasons in zip(*(kernel.stalls()[:STALLS_SHOWN] for kernel in kernels), strict=False):
        rows.append(["warps wait for", *(f"{reason} {share:.0%}" for reason, share in reasons)])
    caption = ", ".join([f"{w.name} {job.direction}  {heads}", *options, profile.about["gpu"]["name"]])
    return f"{caption}\n\n{markdown_table(['', *(kernel.name for kernel in kernels)], rows)}\n"


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
        collect.collect(job, out)
        print(table(metrics.read(out)))
    except (ToolError, KernelError, ValueError, OSError) as e:
        _fail(e)


@app.command()
def report(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles: folders that `run` left.")],
    json_to: OptionalJsonPath = None,
) -> None:
    """Show where each kernel of a profile spent its time."""
    try:
        found = [metrics.read(folder) for folder in profiles]
        for profile in found:
            print(table(profile))
        if json_to is not None:
            figures = {**found[0].environment, "profiles": [profile.to_dict() for profile in found]}
            json_to.write_text(filed.text(figures))
    except (ValueError, OSError) as e:
        _fail(e)


if __name__ == "__main__":
    app()
