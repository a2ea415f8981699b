"""Kernels under Nsight Compute: `python -m tools.ncu run | report`.

A profile is a folder that `run` leaves and everything else reads, on any machine:

    about.json      what ran: workload, specifications, kernels' symbols, GPU, versions, commit
    report.ncu-rep  the report, for the graphical ncu-ui
    metrics.csv     its metrics, a line a kernel
"""
