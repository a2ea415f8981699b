"""A machine on which warps wait for each other as they do on Hopper: what synchronizes is real, data are names of data.

Each warp is a greenlet that runs the kernel's own code. It gives way at every operation that other warps can see, and a
random schedule chooses what runs next: a warp, or the copy engine with one of its copies. A schedule fails (`Fault`) if

- no warp and no copy can go on, but not all have ended;
- a warp waits for a phase of an mbarrier that is over: the one after may never come to an end, or was meant;
- an mbarrier has more arrivals than its count, or is left within a phase at the end;
- two accesses to a stage of shared memory are not in an order that barriers give, one of them a write: vector clocks
  say so in whatever order they come. Products and copies read until a warp has waited for their group. A product
  (wgmma) is one of the whole warp group: it begins when all four warps are there, and a warp that has waited for it
  knows that it is over for all of them, as CUTLASS's pipelines take it too;
- a CTA writes over what loads in another one may not have read yet. A warp's loads and stores are under way until it
  fences, or comes to a barrier of its CTA or cluster. Its stores and arrivals in its own CTA queue up behind them, as
  compilers take for granted. Its arrivals in another CTA may overtake them, as may copies that it starts;
- what a thread wrote is read by the copy engine or a product without a fence, an accumulator before its product ends;
- a warp or a copy accesses a CTA that has ended, or a CTA ends before its copies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from greenlet import greenlet

from tests.protocol.state import (
    Agent,
    Cell,
    Cluster,
    Cta,
    Deadlock,
    Entry,
    Fault,
    Group,
    Mbarrier,
    Meeting,
    Part,
    WarpGroup,
    Write,
)


class Schedule:
    """The rule that chooses which entry goes on: fair, or with one slowed down, or by priorities that change now and
    then."""

    def __init__(self, seed: int, slow: str | None = None, priorities: bool = False) -> None:
        self.seed, self.slow, self.priorities = seed, slow, priorities
        self.random = random.Random(seed)
        self.lowest = 0.0

    def __repr__(self) -> str:
        how = f", slow: {self.slow}" if self.slow else ", by priorities" if self.priorities else ""
        return f"seed {self.seed}{how}"

    def enter(self, entry: Entry) -> None:
        if self.priorities:
            entry.priority = self.random.random()
        elif self.slow is not None:
            entry.slow = entry.kind == self.slow

    def pick(self, runnable: list[Entry]) -> Entry:
        draw, n = self.random.random, len(runnable)
        if self.priorities:
            entry = max(runnable, key=_priority)
            if draw() < 0.02:
                self.lowest -= 1
                entry.priority = self.lowest
            return entry
        entry = runnable[int(draw() * n)]
        for _ in range(50):
            if not entry.slow:
                break
            entry = runnable[int(draw() * n)]
        return entry


def _priority(entry: Entry) -> float:
    return entry.priority


class Machine:
    """Runs one launch under one schedule.

    Args:
        schedule: chooses what runs next.
        clusters_at_once: there is room for so many; others begin as these end. In a random order: CUDA promises none.
        stores: called for what leaves the kernel: (machine, what, where, provenance).
    """

    def __init__(self, schedule: Schedule, clusters_at_once: int = 4, stores: Any = None) -> None:
        self.schedule, self.clusters_at_once, self.stores = schedule, clusters_at_once, stores
        self.runnable: list[Entry] = []
        self.agent: Agent = None  # type: ignore[assignment]
        self.steps = 0
        self.locks: dict[Any, Any] = {}  # clocks, values and waiters of words that warps spin on
        self.epochs: dict[int, int] = {}
        self.barrier_names: dict[int, str] = {}  # by the number among a CTA's mbarriers: pipeline, kind and stage

    # ---------------------------------------------------------------- schedule
    def enter(self, entry: Entry) -> None:
        entry.place = len(self.runnable)
        self.runnable.append(entry)

    def leave(self, entry: Entry) -> None:
        last = self.runnable.pop()
        if last is not entry:
            self.runnable[entry.place] = last
            last.place = entry.place

    def wake(self, waiters: list[Agent]) -> None:
        for agent in waiters:
            self.enter(agent)
        waiters.clear()

    def step(self, doing: str) -> Agent:
        """The running warp is about to do what others see: anybody may go on before. Returns that warp."""
        agent = self.agent
        agent.doing, agent.last = doing, None
        self._next(agent)
        return agent

    def block(self, waiters: list[Agent]) -> None:
        agent = self.agent
        self.leave(agent)
        waiters.append(agent)
        self._next(agent)

    def _next(self, agent: Agent | None) -> None:
        while True:
            if not self.runnable:
                raise Deadlock(
                    "nobody can go on:\n" + "\n".join(f"  {a.name}: {a.doing}" for a in self.agents if not a.ended)
                )
            self.steps += 1
            entry = self.schedule.pick(self.runnable)
            if entry.action is not None:
                self.leave(entry)
                entry.action()
                if agent is None:
                    return
            elif entry is agent:
                return
            else:
                self.agent = entry  # type: ignore[assignment]
                self.agent.greenlet.switch()  # until the schedule chooses this one again
                return

    def copy(self, kind: str, ctas: Iterable[Cta], action: Callable[[], None]) -> None:
        """The copy engine does this at some time."""
        ctas = list(ctas)
        for cta in ctas:
            cta.copies += 1

        def run() -> None:
            for cta in ctas:
                cta.check(f"a copy ({kind})", "comes to")
                cta.copies -= 1
            action()

        entry = Entry(kind, kind, run)
        self.schedule.enter(entry)
        self.enter(entry)

    # ---------------------------------------------------------------- launch
    def launch(self, body: Callable[[], None], grid: int, threads: int, cluster: int) -> None:
        warps = threads // 32
        self.body, self.grid, self.warps, self.cluster = body, grid, warps, cluster
        self.components, self.size = 2 * grid * warps, grid * (2 * warps + 64)
        self.waiting = list(range(0, grid, cluster))
        self.schedule.random.shuffle(self.waiting)
        self.agents: list[Agent] = []
        self.ctas: list[Cta] = []
        self.hub = greenlet.getcurrent()
        try:
            for _ in range(min(self.clusters_at_once, len(self.waiting))):
                self._begin_cluster()
            while any(not agent.ended for agent in self.agents):
                self._next(None)
            while self.runnable:
                self._next(None)
        finally:
            for agent in self.agents:
                if not agent.greenlet.dead and agent.greenlet:
                    agent.greenlet.throw()
        for cta in self.ctas:
            for bar in cta.mbarriers.values():
                if bar.left != bar.count or bar.tx:
                    raise Fault(
                        f"{bar.name} is left in phase {bar.phase}: {bar.left} of {bar.count} to come, {bar.tx} bytes"
                    )

    def _begin_cluster(self) -> None:
        cluster = Cluster(self, self.waiting.pop(0), self.cluster, self.warps)
        for cta in cluster.ctas:
            self.ctas.append(cta)
            cta.running = self.warps
            for warp in range(self.warps):
                index = cta.block * self.warps + warp
                agent = Agent(cta, warp, index, self.grid * self.warps + index, self.size, self._run)
                agent.greenlet.parent = self.hub
                self.schedule.enter(agent)
                self.agents.append(agent)
                self.enter(agent)

    def _run(self) -> None:
        agent = self.agent
        self.body()
        if agent.groups or agent.open or agent.bulk_open:
            raise Fault(f"{agent.name} ends and has not waited for its products or copies")
        agent.ended, cta = True, agent.cta
        self.leave(agent)
        cta.running -= 1
        cta.cluster.running -= 1
        cta.cluster.meeting.check(self, cta.cluster.running)
        if not cta.running:
            if cta.copies:
                raise Fault(f"{cta.name} ends while copies from or to its shared memory go on")
            cta.ended = True
        if not cta.cluster.running and self.waiting:
            self._begin_cluster()

    # ---------------------------------------------------------------- clocks
    def component(self, cell: Cell, key: Any) -> int:
        """Return the component of copies to or from a cell."""
        found = cell.components.get(key)
        if found is None:
            found = cell.components[key] = self.new_component()
        return found

    def new_component(self) -> int:
        self.components += 1
        if self.components > self.size:
            raise RuntimeError("more cells than the clocks have room for")
        return self.components - 1

    def tick(self, agent: Agent, component: int) -> tuple[Any, int]:
        """The clock of a copy that a warp starts, with its next epoch."""
        epoch = self.epochs[component] = self.epochs.get(component, 0) + 1
        clock = agent.elsewhere()
        clock[component] = epoch
        return clock, epoch

    # ---------------------------------------------------------------- mbarriers
    def init_mbarrier(self, cta: Cta, key: Any, number: int, count: int) -> None:
        agent = self.agent
        name = f"mbarrier {number} ({self.barrier_names.get(number, 'of no pipeline')}) of {cta.name}"
        bar = cta.mbarriers[key] = Mbarrier(cta, name, count, self.size)
        bar.clock[agent.index] = agent.clock[agent.index]

    def mbarrier(self, cta: Cta, key: Any, doing: str) -> Mbarrier:
        agent = self.agent
        if cta is not agent.cta:
            cta.check(agent.name, f"{doing} a barrier of")
        bar = cta.mbarriers.get(key)
        if bar is None:
            raise Fault(f"{agent.name} {doing} a barrier of {cta.name} that nobody has initialized")
        return bar

    def arrive(self, cta: Cta, key: Any, count: int) -> None:
        agent = self.step("arrives")
        bar = self.mbarrier(cta, key, "arrives at")
        bar.arrive(self, agent.clock if cta is agent.cta else agent.elsewhere(), count)
        agent.released()

    def expect(self, cta: Cta, key: Any, size: int, arrivals: int) -> None:
        agent = self.step("expects bytes")
        bar = self.mbarrier(cta, key, "expects bytes at")
        bar.tx += size
        if arrivals:
            bar.arrive(self, agent.clock, arrivals)
            agent.released()

    def wait(self, key: Any, parity: int) -> None:
        agent = self.step("waits")
        bar = self.mbarrier(agent.cta, key, "waits at")
        last = agent.waited.get(bar)
        phase = -parity if last is None else last if last & 1 == parity else last + 1
        while True:
            if bar.phase - 1 > phase:
                raise Fault(f"{agent.name} waits for phase {phase} of {bar.name}, which is in phase {bar.phase}")
            if bar.phase - 1 == phase:
                break
            agent.doing = f"waits for phase {phase} of {bar.name} ({bar.left} of {bar.count} to come, {bar.tx} bytes)"
            self.block(bar.waiters)
        agent.waited[bar] = phase
        np.maximum(agent.clock, bar.clock, out=agent.clock)

    # ---------------------------------------------------------------- barriers that count warps
    def meet(self, number: int, threads: int, vote: bool = False) -> bool:
        agent = self.step(f"meets at barrier {number}")
        if agent.mask is not None:
            raise Fault(f"{agent.name} comes to barrier {number} with a part of its lanes")
        meeting = agent.cta.meetings.setdefault(number, Meeting(self.size))
        which = meeting.arrive(self, agent, threads // 32, vote)
        agent.doing = f"waits at barrier {number} for {threads // 32} warps"
        while meeting.gone == which:
            self.block(meeting.waiters)
        np.maximum(agent.clock, meeting.clock, out=agent.clock)
        return meeting.votes[1]

    def arrive_cluster(self) -> None:
        agent = self.step("arrives at the cluster's barrier")
        cluster = agent.cta.cluster
        agent.cluster_gone = cluster.meeting.gone
        cluster.meeting.expected = cluster.running
        cluster.meeting.arrive(self, agent, cluster.running)

    def await_cluster(self) -> None:
        agent = self.step("waits at the cluster's barrier")
        meeting = agent.cta.cluster.meeting
        agent.doing = "waits at the cluster's barrier"
        while meeting.gone == agent.cluster_gone:
            self.block(meeting.waiters)
        np.maximum(agent.clock, meeting.clock, out=agent.clock)

    # ---------------------------------------------------------------- products
    def product(self, cells: list[tuple[Cell, Part]]) -> Group:
        agent = self.agent
        if agent.open is None:
            agent.open = Group()
        agent.open.cells += cells
        return agent.open

    def commit_products(self) -> None:
        agent = self.agent
        group, agent.open = agent.open, None
        if group is None:
            return
        agent.groups.append(group)
        agent.products += 1
        group.number = agent.products
        four = agent.cta.warp_groups.get(agent.warp // 4)
        if four is None:
            four = agent.cta.warp_groups[agent.warp // 4] = WarpGroup(self.new_component())
        there, clock = four.groups.setdefault(group.number, ([], np.zeros(self.size, np.int32)))
        there.append((agent, group))
        np.maximum(clock, agent.clock, out=clock)
        agent.released()
        if len(there) == 4:
            self.wake(four.waiters)

    def await_products(self, left: int) -> None:
        agent = self.step("waits for products")
        while len(agent.groups) > left:
            group = agent.groups.pop(0)
            four = agent.cta.warp_groups[agent.warp // 4]
            while group.number > four.over and len(four.groups[group.number][0]) < 4:
                agent.doing = "waits for products that not all warps of its warp group have issued"
                self.block(four.waiters)
            there, clock = four.groups[group.number]
            if group.number > four.over:
                four.over = group.number
                for other, its in there:
                    for cell, part in its.cells:
                        cell.end_read(other, part, four.component, group.number)
            np.maximum(agent.clock, clock, out=agent.clock)
            agent.clock[four.component] = max(agent.clock[four.component], group.number)
            for then in group.then:
                then()

    # ---------------------------------------------------------------- copies
    def load(
        self, cells: list[tuple[Cta, Cell]], part: tuple[Any, Any], prov: frozenset[Any], size: int, key: Any
    ) -> None:
        """Global memory -> a cell of each CTA, whose mbarrier `key` counts the bytes."""
        agent = self.step("loads")
        before = agent.elsewhere()
        for cta, cell in cells:
            if cta is not agent.cta:
                cta.check(agent.name, "loads into")
            cell.check_write(agent, part, "load", before)
            clock, epoch = self.tick(agent, component := self.component(cell, part))
            cell.writes[part] = Write(f"the load by {agent.name}", component, epoch, prov, True)
            bar = self.mbarrier(cta, key, "loads to")

            def end(bar: Mbarrier = bar, clock: Any = clock) -> None:
                bar.complete_tx(self, clock, size)

            self.copy("loads", [cta], end)

    def send(self, source: Cell, part: Part, cta: Cta, cell: Cell, size: int, key: Any) -> None:
        """A cell -> one of another CTA, whose mbarrier `key` counts the bytes."""
        agent = self.step("sends")
        cta.check(agent.name, "sends to")
        prov = source.read(agent, part, True, "send")
        into = ("sent", 0)
        cell.check_write(agent, into, "send", agent.elsewhere())
        reader, component = self.component(source, "sent"), self.component(cell, into)
        clock, epoch = self.tick(agent, component)
        clock[reader] = read_epoch = self.tick(agent, reader)[1]
        cell.writes[into] = Write(f"the copy by {agent.name}", component, epoch, prov, True)
        source.pending[reader, part] = (1, f"the copy by {agent.name}")
        bar = self.mbarrier(cta, key, "sends to")

        def end() -> None:
            del source.pending[reader, part]
            source.reads[reader, part] = (reader, read_epoch, f"the copy by {agent.name}")
            bar.complete_tx(self, clock, size)

        self.copy("sends", [agent.cta, cta], end)

    def bulk_store(self, reads: list[tuple[Cell, Part]], then: Callable[[frozenset[Any]], None]) -> None:
        """Shared -> global memory, in the warp's bulk group; `then` takes what is stored and notes it."""
        agent = self.step("stores by the copy engine")
        if agent.bulk_open is None:
            agent.bulk_open = Group()
        group, prov = agent.bulk_open, frozenset()
        for cell, part in reads:
            prov = prov | cell.begin_read(agent, part, "store")
        group.cells += reads
        group.left += 1
        group.reading += 1
        then(prov)

        def read() -> None:
            group.reading -= 1
            self.wake(group.waiters)
            self.copy("stores", [], written)

        def written() -> None:
            group.left -= 1
            self.wake(group.waiters)

        self.copy("stores", [agent.cta], read)

    def commit_bulk(self) -> None:
        agent = self.agent
        agent.bulk.append(agent.bulk_open or Group())
        agent.bulk_open = None

    def await_bulk(self, left: int, read: bool) -> None:
        agent = self.step("waits for stores")
        for group in agent.bulk[: len(agent.bulk) - left]:
            agent.doing = "waits for stores"
            while group.reading if read else group.left:
                self.block(group.waiters)
            for cell, part in group.cells:
                cell.end_read(agent, part, agent.index, int(agent.clock[agent.index]))
            group.cells = []
            if not read:
                for then in group.then:
                    then()
                group.then = []
        if not read:
            del agent.bulk[: len(agent.bulk) - left]

    # ---------------------------------------------------------------- words that warps spin on
    def word(self, key: Any) -> Any:
        found = self.locks.get(key)
        if found is None:
            found = self.locks[key] = [None, np.zeros(self.size, np.int32), []]
        return found

    def load_word(self, key: Any) -> Any:
        """A loop that reads the same again waits until the word changes."""
        agent, word = self.agent, self.word(key)
        if agent.last == (key, word[0]):
            agent.doing = f"spins on {key}, which is {word[0]}"
            self.block(word[2])
        else:
            self._next(agent)
        agent.last = (key, word[0])
        return word

    def store_word(self, key: Any, value: Any) -> Any:
        word = self.word(key)
        word[0] = value
        self.wake(word[2])
        return word
