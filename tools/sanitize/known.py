"""Reports that are a tool's error, and why. A control that is correct and reported too is the proof."""

from __future__ import annotations

from typing import Any

# By kernel: what passes between warps through shared memory and an mbarrier.
HANDED_OVER = {
    "bwd_wide": "one warp group hands P to the other",
    "fwd": "the forward's producer tells the warp groups their tile",
}


def why(tool: str, report: dict[str, Any], shown: dict[str, int]) -> str | None:
    """Why a report is a false positive, None where it is an error.

    Args:
        tool: that reported it.
        report: its `what`, `kernel`, `instructions`, and `unpaced`: cases in a fixed order or without dQ have it.
        shown: reports of the tool about each of the controls.
    """
    instructions = report["instructions"]
    copied = instructions[:1] == ["UBLKCP.S.G"] and all(name.startswith("LDS") for name in instructions[1:])
    if tool == "racecheck" and copied:
        return _bulk_copy(shown)
    handed = len(instructions) > 1 and all(name.startswith(("STS", "LDS")) for name in instructions)
    passing = next((how for kernel, how in HANDED_OVER.items() if report["kernel"].startswith(kernel)), None)
    if tool == "racecheck" and handed and passing and shown.get("exchange"):
        return (
            "racecheck does not follow mbarriers between warps: the control exchange, which hands values over as "
            f"{passing} (store, __syncwarp, one lane arrives; wait, load), is reported too"
        )
    if tool == "racecheck" and _polls(report) and shown.get("polled"):
        return (
            "racecheck takes a word that one lane writes and another polls, both volatile, for a race: to the memory "
            "model of the PTX ISA such accesses are relaxed ones, and the control polled, which paces a warp as the "
            "kernel paces the one that clears dQ ahead, is reported too"
        )
    if tool == "synccheck" and shown.get("meeting"):
        return _meeting(report)
    return None


def _polls(report: dict[str, Any]) -> bool:
    """The word that paces the clearing of dQ, which sums in a fixed order and backwards without dQ do not have: another
    race of such instructions would show in their cases too."""
    if not report["kernel"].startswith("bwd_narrow") or report["instructions"] != ["STS", "LDS"]:
        return False
    return not report["unpaced"]


def _meeting(report: dict[str, Any]) -> str | None:
    """The end of a turn of head dim 64's forward, whose CTAs are no clusters: all warps meet at a barrier there."""
    if (
        report["what"].startswith("Barrier error detected. Divergent thread(s) in block")
        and report["kernel"][:3] == "fwd"
    ):
        return (
            "synccheck wants all threads of a CTA at one instruction, a barrier of the PTX ISA counts who comes, from "
            "wherever: the control meeting, in which two warps come from two places and get the right results, is "
            "reported too"
        )
    if "buffer overflow" in report["what"]:
        return (
            "synccheck keeps 256 reports of a launch, and those of the control meeting's kind fill them: they come at "
            "the end of a turn, so that what a CTA does before would have been reported first"
        )
    return None


def _bulk_copy(shown: dict[str, int]) -> str | None:
    """Row statistics of the backward: a bulk copy to shared memory against the loads of its previous or next stage."""
    if shown.get("bulk_ring"):
        return (
            "racecheck does not follow a bulk copy's completion on its mbarrier: the control bulk_ring, which waits on "
            "both sides as the PTX ISA asks, is reported too"
        )
    if shown.get("bulk_ring_no_syncwarp"):
        return (
            "racecheck orders only the arriving lane's loads before a stage is released: the control "
            "bulk_ring_no_syncwarp is reported, with a __syncwarp it is not. In the kernels every lane has used what it"
            " loaded before wgmma.wait_group.sync.aligned, which all lanes of the warp execute together before one of "
            "them arrives"
        )
    return None
