"""`python -m tests.protocol`: random schedules of the kernels' waits and arrivals, on the CPU."""

from __future__ import annotations

import argparse
import sys
import time

from tests.protocol.cases import cases, schedules
from tests.protocol.state import Fault


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("--kernel", default="", help="cases whose name begins so: bwd_narrow, 'fwd d64'; default: all")
    parser.add_argument(
        "--schedules", type=int, default=300, help="of each case (%(default)s), each of about half a second"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first one (%(default)s)")
    options = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(options.kernel)]
    if not chosen or options.schedules < 1:
        parser.error(f"expected --schedules of 1 or more and --kernel of {', '.join(case.name for case in cases())}")
    failed = 0
    for case in chosen:
        begin, steps, faults, count = time.perf_counter(), 0, 0, 0
        for schedule in schedules(case, options.schedules, options.seed):
            count += 1
            try:
                steps += case.run(schedule)
            except Fault as fault:
                faults += 1
                print(f"{case.name}, {schedule!r}: {fault}\n  again: {case.again(schedule)}", flush=True)
                if faults == 3:
                    break
        failed += faults
        seconds = time.perf_counter() - begin
        each = f", {steps // (count - faults)} steps each" if count > faults else ""
        print(f"{case.name}: {faults} faults in {count} schedules{each}, {seconds:.0f} s", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
