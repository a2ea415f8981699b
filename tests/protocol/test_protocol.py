"""Every kernel's waits and arrivals under random schedules; and each fault that is put into the sources is found.

For more schedules: `python -m tests.protocol --schedules 10000 --kernel bwd_wide`.
"""

import re

import pytest

from codegen import tiles
from tests.protocol.cases import Case, cases, schedules
from tests.protocol.faults import PLANTED, SINGLE_DS
from tests.protocol.machine import Schedule
from tests.protocol.sources import kernels
from tests.protocol.state import Deadlock, Fault

CASES = {case.name: case for case in cases()}
UNTIL_FOUND = 60


def run(case: Case, schedule: Schedule) -> None:
    try:
        case.run(schedule)
    except Fault as fault:
        pytest.fail(f"{case.name}, {schedule!r}: {fault}\nagain: {case.again(schedule)}")


@pytest.mark.parametrize("name", CASES)
def test_kernels_wait_for_what_they_use(name):
    """One schedule of each case: of the cases of a kernel some are fair, some by priorities, some have a warp that is
    slow. `.ci/run` has others."""
    for schedule in schedules(CASES[name], 1, list(CASES).index(name)):
        run(CASES[name], schedule)


@pytest.mark.parametrize(
    "fault", [fault for fault in PLANTED if fault is not SINGLE_DS], ids=lambda fault: f"{fault.case}: {fault.name}"
)
def test_faults_are_found(fault):
    for schedule in schedules(CASES[fault.case], UNTIL_FOUND):
        try:
            CASES[fault.case].run(schedule, fault.edits)
        except Fault:
            return
    pytest.fail(f"{UNTIL_FOUND} schedules of {fault.case} do not find: {fault.name}")


def test_a_single_barrier_for_dS_hangs():
    """This hang was seen on the GPU: a slow exchange warp waits for a phase that is over."""
    case, slow = CASES[SINGLE_DS.case], "warp 3 of rank 0"
    said = r"warp 3 waits for phase \d+ of mbarrier \d+ \(dS.full, stage 0\) of CTA \d+, which is in"
    for seed in range(20):
        try:
            case.run(Schedule(seed, slow=slow), SINGLE_DS.edits)
        except Fault as fault:
            if re.search(said, str(fault)):
                return
    pytest.fail("no schedule finds it")


def test_every_native_head_dim_is_of_one_backward():
    loaded = kernels()
    narrow, *others = (getattr(loaded.bwd, f"{name}Backward").HEAD_DIMS for name in ("Narrow", "Wide", "Split"))
    assert sum(others, narrow) == tiles.HEAD_DIMS, (
        "an entry of the table is not enough: CONTRIBUTING.md, Add a head dim"
    )
    assert narrow[-1] == tiles.NARROW


def test_schedules_repeat():
    case = CASES["fwd d64"]
    runs, again = ([case.run(schedule) for schedule in schedules(case, 3)] for _ in range(2))
    assert runs == again
    assert len(set(runs)) > 1


def test_who_waits_is_named():
    fault = next(fault for fault in PLANTED if fault.name == "Q is not released")
    case = CASES[fault.case]
    with pytest.raises(
        Deadlock,
        match=r"CTA 0 warp 0: waits for phase \d+ of mbarrier \d+ \(Q.empty, stage \d\) of CTA 0 \(\d+ of 16 to come",
    ):
        case.run(schedules(case, 1)[0], fault.edits)
