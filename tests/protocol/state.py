"""The state of warps, barriers and stages of shared memory, as `machine` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import greenlet

if TYPE_CHECKING:
    from tests.protocol.machine import Machine

LANES = np.arange(32)
GARBAGE = frozenset({("nothing",)})  # in memory that was never written
Part = tuple[Any, Any] | None  # a way to divide a cell, and a part; None: all of it


class Fault(Exception):
    """An error of a kernel."""


class Deadlock(Fault):
    """No warp and no copy can go on."""


class Entry:
    """An entry that a schedule can choose: a warp or a copy."""

    __slots__ = ("action", "kind", "name", "place", "priority", "slow")

    def __init__(self, name: str, kind: str, action: Callable[[], None] | None = None) -> None:
        self.name, self.kind, self.action = name, kind, action
        self.place, self.priority, self.slow = -1, 0.0, False


class Group:
    """Products, or bulk copies, that a warp waits for together."""

    __slots__ = ("cells", "left", "number", "reading", "then", "waiters")

    def __init__(self) -> None:
        self.cells: list[tuple[Cell, Part]] = []
        self.number = 0  # of a warp group's products
        self.left = self.reading = 0  # bulk copies that have not ended, and that have not read all
        self.then: list[Callable[[], None]] = []  # once the warp knows that the group has ended
        self.waiters: list[Agent] = []


class Agent(Entry):
    """A warp."""

    __slots__ = (
        "accesses", "bulk", "bulk_open", "clock", "cluster_gone", "cta", "doing", "ended", "greenlet", "groups",
        "index", "last", "mask", "open", "performed", "products", "under_way", "unfenced", "unfenced_global", "waited",
        "warp",
    )  # fmt: skip

    def __init__(self, cta: Cta, warp: int, index: int, accesses: int, size: int, run: Callable[[], None]) -> None:
        super().__init__(f"{cta.name} warp {warp}", f"warp {warp} of rank {cta.rank}")
        self.cta, self.warp, self.index = cta, warp, index
        self.accesses = accesses  # component of its loads and stores
        self.clock = np.zeros(size, np.int32)
        self.clock[index] = self.clock[accesses] = 1
        self.performed, self.under_way = 0, False  # the epoch up to which these are; and whether there are later ones
        self.mask: Any = None  # lanes that take part, None: all
        self.groups: list[Group] = []
        self.open: Group | None = None
        self.products = 0  # groups of them
        self.bulk: list[Group] = []
        self.bulk_open: Group | None = None
        self.unfenced: list[Write] = []
        self.unfenced_global: list[Write] = []
        self.waited: dict[Mbarrier, int] = {}  # the last phase that this warp has waited for
        self.last: Any = None  # what a loop spins on
        self.ended, self.cluster_gone, self.doing = False, 0, "begins"
        self.greenlet = greenlet(run)

    def lanes(self) -> int:
        return 32 if self.mask is None else int(self.mask.sum())

    def knows(self, component: int, epoch: int) -> bool:
        return bool(self.clock[component] >= epoch)

    def released(self) -> None:
        self.clock[self.index] += 1
        self.clock[self.accesses] += 1

    def settle(self) -> None:
        """Note that the agent has waited until its loads and stores are performed."""
        if self.under_way:
            self.performed, self.under_way = int(self.clock[self.accesses]), False
            self.clock[self.accesses] += 1

    def elsewhere(self) -> Any:
        """The clock that another CTA or a copy receives: without loads and stores that are under way."""
        clock = self.clock.copy()
        clock[self.accesses] = self.performed
        return clock

    def access(self) -> tuple[int, int]:
        """Begin a load or store. Returns its component and epoch."""
        self.under_way = True
        return self.accesses, int(self.clock[self.accesses])


class Write:
    __slots__ = ("by", "component", "epoch", "fenced", "prov")

    def __init__(self, by: str, component: int, epoch: int, prov: frozenset[Any], fenced: bool) -> None:
        self.by, self.component, self.epoch, self.prov, self.fenced = by, component, epoch, prov, fenced


class Cell:
    """A stage of shared memory, or whatever else is written as one: who wrote and who reads it."""

    __slots__ = ("components", "name", "pending", "reads", "writes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.writes: dict[Any, Write] = {}
        self.reads: dict[Any, tuple[int, int, str]] = {}
        self.pending: dict[Any, tuple[int, str]] = {}
        self.components: dict[Any, int] = {}

    def read(self, agent: Agent, part: Part, by_engine: bool, what: str) -> frozenset[Any]:
        """Read the content, as the agent sees it; raises Fault if it may not be there yet."""
        found, prov = None, frozenset()
        for key, write in self.writes.items():
            if part is not None and key[0] == part[0] and key != part:
                continue
            if not agent.knows(write.component, write.epoch):
                raise Fault(f"{agent.name} reads {self.name} ({what}), and nothing says that {write.by} has written it")
            if by_engine and not write.fenced:
                raise Fault(f"{agent.name} has {self.name} read ({what}) without a fence after {write.by} wrote it")
            found = write
            if prov is not write.prov:
                prov = prov | write.prov if prov else write.prov
        return GARBAGE if found is None else prov

    def begin_read(self, agent: Agent, part: Part, what: str) -> frozenset[Any]:
        prov = self.read(agent, part, True, what)
        key = (agent.index, part)
        self.pending[key] = (self.pending.get(key, (0, ""))[0] + 1, f"{agent.name} ({what})")
        return prov

    def end_read(self, agent: Agent, part: Part, component: int, epoch: int) -> None:
        key = (agent.index, part)
        count, who = self.pending.pop(key)
        if count > 1:
            self.pending[key] = (count - 1, who)
        self.reads[component, part] = (component, epoch, who)

    def note_read(self, agent: Agent, part: Part, what: str, by_engine: bool = False) -> frozenset[Any]:
        """A load, which is under way until the warp settles."""
        prov = self.read(agent, part, by_engine, what)
        component, epoch = agent.access()
        self.reads[component, part] = (component, epoch, f"{agent.name} ({what})")
        return prov

    def check_write(self, agent: Agent, part: tuple[Any, Any], what: str, clock: Any = None) -> None:
        """A fault unless all that was read and written there is over; then it is forgotten. clock: None for agent's."""
        clock = agent.clock if clock is None else clock
        for (_, other), (_, who) in self.pending.items():
            if other is None or other == part or other[0] != part[0]:
                raise Fault(f"{agent.name} writes {self.name} ({what}) while {who} still reads it")
        old = []
        for key, (component, epoch, who) in self.reads.items():
            other = key[1]
            if other is None or other == part or other[0] != part[0]:
                if clock[component] < epoch:
                    raise Fault(f"{agent.name} writes {self.name} ({what}), and nothing says that {who} has read it")
                if other is not None:
                    old.append(key)
        for key in old:
            del self.reads[key]
        gone = []
        for key, write in self.writes.items():
            if key == part or key[0] != part[0]:
                if clock[write.component] < write.epoch:
                    raise Fault(
                        f"{agent.name} writes {self.name} ({what}), and nothing says that {write.by} is through"
                    )
                gone.append(key)
        for key in gone:
            del self.writes[key]

    def write(self, agent: Agent, part: tuple[Any, Any], prov: frozenset[Any], what: str) -> Write:
        """Write by the warp's own stores."""
        self.check_write(agent, part, what)
        write = Write(f"{agent.name} ({what})", *agent.access(), prov, False)
        self.writes[part] = write
        return write


class Mbarrier:
    __slots__ = ("arrived", "clock", "count", "cta", "left", "name", "phase", "tx", "waiters")

    def __init__(self, cta: Cta, name: str, count: int, size: int) -> None:
        self.cta, self.name, self.count, self.left, self.tx, self.phase = cta, name, count, count, 0, 0
        self.arrived = np.zeros(size, np.int32)  # clocks of the warps that have arrived in this phase
        self.clock = np.zeros(size, np.int32)  # and in the phases before
        self.waiters: list[Agent] = []

    def arrive(self, machine: Machine, clock: Any, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Fault(f"{self.name} has more arrivals in phase {self.phase} than its {self.count}")
        np.maximum(self.arrived, clock, out=self.arrived)
        self.check(machine)

    def complete_tx(self, machine: Machine, clock: Any, size: int) -> None:
        self.tx -= size
        np.maximum(self.arrived, clock, out=self.arrived)
        self.check(machine)

    def check(self, machine: Machine) -> None:
        if self.left == 0 and self.tx == 0:
            self.phase += 1
            self.left = self.count
            np.maximum(self.clock, self.arrived, out=self.clock)
            self.arrived[:] = 0
            machine.wake(self.waiters)


class Meeting:
    """A barrier that counts warps: a named one of a CTA, or that of a cluster."""

    __slots__ = ("arrived", "came", "clock", "expected", "gone", "left", "size", "votes", "waiters")

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived, self.clock = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.came = self.gone = self.expected = 0
        self.waiters: list[Agent] = []
        self.votes = [False, False]  # of the meeting that goes on, and of the last one

    def arrive(self, machine: Machine, agent: Agent, expected: int, vote: bool = False) -> int:
        """Returns the number of the meeting."""
        if self.came and expected != self.expected:
            raise Fault(f"{agent.name} meets {expected} warps at a barrier where others meet {self.expected}")
        self.expected, number = expected, self.gone
        self.came += 1
        self.votes[0] |= vote
        agent.settle()
        np.maximum(self.arrived, agent.clock, out=self.arrived)
        agent.released()
        self.check(machine, expected)
        return number

    def check(self, machine: Machine, expected: int) -> None:
        if self.came and self.came == expected:
            self.gone += 1
            self.came = 0
            self.votes = [False, self.votes[0]]
            self.clock = np.maximum(self.clock, self.arrived)
            self.arrived = np.zeros(self.size, np.int32)
            machine.wake(self.waiters)


class WarpGroup:
    """The products of four warps; the n-th group of each of them is the same."""

    def __init__(self, component: int) -> None:
        self.component = component  # of what has been read
        self.groups: dict[int, tuple[list[tuple[Agent, Group]], Any]] = {}  # under way: their warps, and clocks
        self.over = 0  # groups
        self.waiters: list[Agent] = []


class Cta:
    def __init__(self, cluster: Cluster, rank: int, block: int) -> None:
        self.cluster, self.rank, self.block = cluster, rank, block
        self.name = f"CTA {block}"
        self.regions: list[Any] = []
        self.mbarriers: dict[Any, Mbarrier] = {}
        self.meetings: dict[int, Meeting] = {}
        self.warp_groups: dict[int, WarpGroup] = {}
        self.copies = 0  # of the copy engine, from or to its shared memory
        self.running = 0
        self.ended = False

    def check(self, who: str, what: str) -> None:
        if self.ended:
            raise Fault(f"{who} {what} {self.name}, which has ended")


class Cluster:
    def __init__(self, machine: Machine, first: int, size: int, warps: int) -> None:
        self.ctas = [Cta(self, rank, first + rank) for rank in range(size)]
        self.meeting = Meeting(machine.size)
        self.running = size * warps
