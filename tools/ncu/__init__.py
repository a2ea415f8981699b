"""Kernels under Nsight Compute: `python -m tools.ncu run | report | compare | hot`.

A profile is a folder that `run` leaves and everything else reads, on any machine:

    about.json      what ran: workload, specifications, GPU, versions, commit
    report.ncu-rep  the report, for the graphical ncu-ui
    metrics.csv     its metrics, a line a kernel
    source.csv      its sampled instructions
    lines.json      the source line of each instruction
"""
