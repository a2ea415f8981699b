"""Reports that are a tool's error, and why. A control that is correct and reported too is the proof."""

from __future__ import annotations

from typing import Any

CTA_BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x0"
REASONS = {
    "bulk copy": (
        "does not follow a bulk copy's completion on its mbarrier. The control bulk_ring, which waits on both "
        "sides as the PTX ISA asks, is reported too"
    ),
    "bulk copy, other lanes": (
        "orders only the arriving lane's loads before a stage is released: the control bulk_ring_no_syncwarp is "
        "reported, with a __syncwarp it is not. In the kernels every lane has used what it loaded before "
        "wgmma.wait_group.sync.aligned, which all lanes of the warp execute together before one of them arrives"
    ),
    "handed over": (
        "does not follow mbarriers between warps. The control exchange, which hands values over as the "
        "forward's producer tells the warp groups their tile and as a warp group of the wide and the split backward "
        "hands P to the other (store, __syncwarp, one lane arrives; wait, load), is reported too"
    ),
    "polled": (
        "takes a word that one lane writes and another polls, both volatile, for a race. To the memory model of "
        "the PTX ISA such accesses are relaxed ones, and the control polled, which paces a warp as the kernel paces "
        "the one that clears dQ ahead, is reported too"
    ),
    "meeting": (
        "wants all threads of a CTA at one instruction; a barrier of the PTX ISA counts who comes, from "
        "wherever. The control meeting, in which two warps come from two places and get the right results, is reported "
        "too"
    ),
    "meeting, overflow": (
        "keeps 256 reports of a launch, and those of the control meeting's kind fill them. In the forward they come "
        "at the end of a turn, so that what a CTA does before would have been reported first; in the backward of few "
        "keys at set-up, so that nothing is known of the barriers behind"
    ),
}  # fmt: skip


def why(tool: str, report: dict[str, Any], shown: dict[str, int]) -> str | None:
    """The name of REASONS by which a tool's report is a false positive, None where it is an error.

    Args:
        report: its `what`, `kernel`, `instructions`, and `unpaced`: cases in a fixed order or without dQ have it.
        shown: reports of the tool about each of the controls.
    """
    what, kernel, instructions = report["what"], report["kernel"], report["instructions"]
    if tool == "racecheck":
        # Row statistics of the backward: a bulk copy to shared memory against loads of its previous or next stage.
        if instructions[:1] == ["UBLKCP.S.G"] and all(name.startswith("LDS") for name in instructions[1:]):
            other_lanes = "bulk copy, other lanes" if shown.get("bulk_ring_no_syncwarp") else None
            return "bulk copy" if shown.get("bulk_ring") else other_lanes
        handed = len(instructions) > 1 and all(name.startswith(("STS", "LDS")) for name in instructions)
        # With windows the narrow backward's producer hands over the words of a query block so: one store of four.
        words = kernel == "bwd.FeaturedNarrow" and instructions == ["STS.128", "LDS"]
        handed &= kernel.startswith(("bwd_wide", "bwd.FeaturedWide", "bwd_split", "bwd.FeaturedSplit", "fwd"))
        if (handed or words) and shown.get("exchange"):
            return "handed over"
        # The word that paces the clearing of dQ, which sums in a fixed order and backwards without dQ do not have:
        # another race of such instructions would show in their cases too.
        narrow = kernel.startswith(("bwd_narrow", "bwd.FeaturedNarrow"))
        polls = narrow and instructions == ["STS", "LDS"] and not report["unpaced"]
        if polls and shown.get("polled"):
            return "polled"
    if tool == "synccheck" and shown.get("meeting"):
        # CTAs that are no clusters: all warps meet at the CTA's barrier, at the end of a turn of head dim 64's forward,
        # at set-up in the backward of few keys.
        alone = kernel.startswith("fwd") or (kernel.startswith("bwd_narrow") and instructions == [CTA_BARRIER])
        if what.startswith("Barrier error detected. Divergent thread(s) in block") and alone:
            return "meeting"
        if "buffer overflow" in what:
            return "meeting, overflow"
    return None
