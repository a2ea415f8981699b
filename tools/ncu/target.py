"""The profiled program: `python -m tools.ncu.target JOB.json` runs it once, then between the profiler's marks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from dualkv.bench.inputs import Inputs
from tools.ncu.job import Job


def main(path: Path) -> None:
    job = Job.from_dict(json.loads(path.read_text()))
    job.use_tile()
    made = Inputs(job.workload)
    host = made.layout.offsets, made.layout.parent, made.scale, job.deterministic

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.dualkv.fwd(made.q, made.k, made.v, *host)
        return result

    out, lse = forward()
    dout = made.dout

    def call() -> None:
        if job.direction == "fwd":
            forward()
        else:
            torch.ops.dualkv.bwd(dout, made.q, made.k, made.v, out, lse, *host)

    call()  # loads kernels and makes the plan
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
