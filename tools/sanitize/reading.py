"""Turn the output of compute-sanitizer into reports by case."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from tools.sanitize.target import END, FAILED, MARK

HEADLINE = re.compile(r"^========= (\S.*)$")
DETAIL = re.compile(r"^=========     \s*(.*)$")
PLACE = re.compile(r"(\S+)\+0x([0-9a-f]+)(?: in \S+)?")
NOT_PRINTED = re.compile(r"(\d+) (?:errors?|hazards?|warnings?) (?:was|were) not printed")
HAZARDS = re.compile(r"\[(\d+) hazards?\]")
NOT_REPORTS = re.compile(r"COMPUTE-SANITIZER|\w+ SUMMARY|Saved host backtrace|Host Frame|This tool is deprecated")
Place = tuple[str, int]  # a kernel's symbol, offset of an instruction


@dataclass(frozen=True)
class Report:
    """The reports of a tool on one case: equal messages once.

    Attributes:
        case: its name, "" before the first.
        what: the message, without the place.
        places: instructions concerned.
    """

    case: str
    what: str
    places: tuple[Place, ...]


@dataclass
class Output:
    """
    Attributes:
        reports: how often each was printed.
        begun, ended: names of cases; one that began and did not end failed, or ended the process.
        failures: "case: why" of those that failed in the program's own eyes.
        not_printed: reports beyond the tool's limit.
    """

    reports: Counter[Report]
    begun: list[str]
    ended: list[str]
    failures: list[str]
    not_printed: int


def parse(text: str) -> Output:
    """Parse the output of a tool and of the program that it ran."""
    found: Counter[Report] = Counter()
    begun: list[str] = []
    ended: list[str] = []
    failures: list[str] = []
    block: list[str] = []

    def close() -> None:
        if block:
            report = _report(begun[-1] if begun else "", block)
            found[report] += max(sum(int(n) for line in block for n in HAZARDS.findall(line)), 1)
            block.clear()

    for line in text.splitlines():
        if line.startswith(MARK):
            close()
            begun.append(line.removeprefix(MARK))
        elif line == END:
            close()
            ended.append(begun[-1])
        elif line.startswith(FAILED):
            close()
            failures.append(f"{begun[-1]}: {line.removeprefix(FAILED)}")
        elif detail := DETAIL.match(line):
            if block:
                block.append(detail[1])
        elif headline := HEADLINE.match(line):
            close()
            if not NOT_REPORTS.match(headline[1]):
                block.append(headline[1])
        elif block:
            close()
    close()
    return Output(found, begun, ended, failures, sum(map(int, NOT_PRINTED.findall(text))))


def _report(case: str, block: list[str]) -> Report:
    said = [line for line in block if not NOT_REPORTS.match(line)]
    places = [(symbol, int(offset, 16)) for line in said for symbol, offset in PLACE.findall(line)]
    what = re.sub(r"\s+", " ", PLACE.sub("", said[0])).strip().removesuffix(" at").strip()
    return Report(case, what, tuple(dict.fromkeys(places)))


def short(symbol: str) -> str:
    """`bwd_narrow.NarrowBackward` of a kernel's symbol."""
    match = re.search(r"cute_kernels(?:_?)([a-z_0-9]+)([A-Z]\w*?)_object_at", symbol)
    return f"{match[1]}.{match[2]}" if match else symbol[:40]
