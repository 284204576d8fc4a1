"""Every interleaving of a small source and its readers: no reader ever accepts a block that is not what its hash says.

The source is a model of an engine (blocks that are written in two moments, requests that are aborted while a step still
writes, weights that change, a process that restarts) around the connector's own ``PublicationIndex`` and ``answer``. A
reader asks hash by hash, copies half a block at a time and asks again, each at any moment. ``Rules`` names what the
protocol demands; ``test_every_rule_is_needed`` breaks one rule each and must find a reader that accepts foreign KV.

Bounds are small there, so all states are visited; larger pools with more readers are walked at random.
``e2e/engine/inside/test_scheduling.py`` does the same with vLLM's own scheduler and block pool.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.compatibility import Compatibility
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.lookup_server import answer

COMPATIBILITY: Final = Compatibility(**{item.name: "" for item in fields(Compatibility)})
PEER: Final = wire.Peer("source", "127.0.0.1", 5600, 1)
HALVES: Final = 2


class ForeignKVError(AssertionError):
    """A reader has accepted KV that is not what it asked for."""


@dataclass(frozen=True)
class Rules:
    """What the protocol demands of both sides."""

    validates: bool = True
    """The reader asks again after its read."""
    validates_after_reading: bool = True
    """It asks when the read has ended, not before."""
    compares_epochs: bool = True
    numbers_are_new: bool = True
    """A publication number is never used again."""
    unpublishes_before_writing: bool = True
    """A block leaves the index in its allocation, not when it is published anew."""
    publishes_whole_blocks: bool = True
    waits_for_steps: bool = True
    """An aborted request does not publish what a step under way has yet to write."""
    clears_with_weights: bool = True
    """A change of the weights un-publishes everything."""
    drops_what_began_before: bool = True
    """A request that began before a change of the weights publishes nothing."""


class Content(NamedTuple):
    """KV of a block: of a hash, computed with some weights."""

    hash: int
    weights: int


@dataclass(frozen=True)
class Job:
    """A request that holds a block and has written some halves of it."""

    hash: int
    begun: int
    """Weights of its time."""
    written: int = 0


@dataclass(frozen=True)
class Reader:
    hashes: tuple[int, ...]
    epoch: int = 0
    found: tuple[tuple[int, int], ...] = ()
    """Blocks and publication numbers, so far."""
    asking: bool = True
    copied: tuple[Content | None, ...] = ()
    valid: int | None = None

    @property
    def complete(self) -> bool:
        return len(self.copied) == HALVES * len(self.found)


@dataclass
class World:
    """One state; ``successors`` gives all that can come next."""

    rules: Rules
    readers: tuple[Reader, ...]
    allocations: int
    """How many more there will be."""
    changes: int
    restarts: int
    memory: tuple[tuple[Content | None, ...], ...]
    jobs: tuple[Job | None, ...]
    weights: int = 0
    index: PublicationIndex = field(default_factory=PublicationIndex)

    def __post_init__(self) -> None:
        self.index.epoch = self.restarts  # distinct, and equal in equal states

    def key(self) -> object:
        index = tuple(
            tuple(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in sorted(vars(self.index).items())
            if isinstance(value, dict | int)
        )
        counters = (self.allocations, self.changes, self.restarts, self.weights)
        return counters, self.memory, self.jobs, self.readers, index

    def clone(self, **changes: Any) -> World:
        index = PublicationIndex.__new__(PublicationIndex)
        vars(index).update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(self.index).items()})
        return replace(self, index=index, **changes)

    def successors(self) -> Iterator[World]:
        for block, job in enumerate(self.jobs):
            if job is None:
                if self.allocations:
                    yield self._allocate(block, 0)
                    yield self._allocate(block, 1)
            else:
                yield from self._go_on(block, job)
        if self.changes:
            yield self._change_weights()
        if self.restarts:
            yield self._restart()
        for number in range(len(self.readers)):
            yield from self._read(number)

    # --- the source ---------------------------------------------------------------------------------------------------

    def _allocate(self, block: int, content: int) -> World:
        """A request takes a free block, whatever it holds."""
        world = self.clone(allocations=self.allocations - 1, jobs=_put(self.jobs, block, Job(content, self.weights)))
        if self.rules.unpublishes_before_writing:
            world.index.unpublish([block])
        return world

    def _go_on(self, block: int, job: Job) -> Iterator[World]:
        """The request writes the next half, or it ends."""
        if job.written < HALVES:
            half = _put(self.memory[block], job.written, Content(job.hash, self.weights))
            jobs = _put(self.jobs, block, replace(job, written=job.written + 1))
            yield self.clone(memory=_put(self.memory, block, half), jobs=jobs)
        if job.written == HALVES:
            yield self._publish(block, job, ends=True)
            yield self.clone(jobs=_put(self.jobs, block, None))  # aborted, nothing published
        elif not self.rules.publishes_whole_blocks and job.written:
            yield self._publish(block, job, ends=True)
        elif not self.rules.waits_for_steps:
            yield self._publish(block, job, ends=False)

    def _publish(self, block: int, job: Job, *, ends: bool) -> World:
        world = self.clone(jobs=_put(self.jobs, block, None) if ends else self.jobs)
        if job.begun != self.weights and self.rules.drops_what_began_before:
            return world
        if not self.rules.numbers_are_new:
            world.index._next_number = 1
        if not self.rules.unpublishes_before_writing:
            world.index.unpublish([block])
        world.index.publish([_hash(job.hash)], [block])
        return world

    def _change_weights(self) -> World:
        world = self.clone(changes=self.changes - 1, weights=self.weights + 1)
        if self.rules.clears_with_weights:
            world.index.clear()
        return world

    def _restart(self) -> World:
        empty = tuple((None,) * HALVES for _ in self.memory)
        jobs = (None,) * len(self.jobs)
        return replace(self, restarts=self.restarts - 1, memory=empty, jobs=jobs, index=PublicationIndex())

    # --- a reader -----------------------------------------------------------------------------------------------------

    def _read(self, number: int) -> Iterator[World]:
        reader = self.readers[number]
        if reader.asking:
            yield self._with(number, self._ask(reader))
            return
        if not reader.complete:
            block = reader.found[len(reader.copied) // HALVES][0]
            half = self.memory[block][len(reader.copied) % HALVES]
            yield self._with(number, replace(reader, copied=(*reader.copied, half)))
        if reader.valid is None and (reader.complete or (reader.copied and not self.rules.validates_after_reading)):
            yield self._with(number, replace(reader, valid=self._validate(reader)))

    def _ask(self, reader: Reader) -> Reader:
        """Look up the next hash; the reader begins to read when one is missing or all are found."""
        asked = reader.hashes[len(reader.found)]
        reply = answer(
            self.index, COMPATIBILITY, PEER, wire.Lookup(wire.VERSION, 1, COMPATIBILITY.digest(), [_hash(asked)])
        )
        assert isinstance(reply, wire.Found)
        if reader.found and reply.epoch != reader.epoch:  # one answer comes from one process
            return replace(reader, asking=False)
        found = reader.found + tuple((run.blocks[0], run.publications[0]) for run in reply.runs)
        missing = len(found) == len(reader.found)
        asking = not missing and len(found) < len(reader.hashes)
        return replace(reader, epoch=reply.epoch, found=found, asking=asking)

    def _validate(self, reader: Reader) -> int:
        if not self.rules.validates:
            return len(reader.found)
        blocks, numbers = [block for block, _ in reader.found], [number for _, number in reader.found]
        epoch = reader.epoch if self.rules.compares_epochs else self.index.epoch
        reply = answer(self.index, COMPATIBILITY, PEER, wire.Validate(wire.VERSION, 1, epoch, blocks, numbers))
        assert isinstance(reply, wire.Validated)
        return reply.valid

    def _with(self, number: int, reader: Reader) -> World:
        """The reader's next state; what it accepts is judged when read and validation have both ended."""
        if reader.valid is not None and reader.complete:
            for position in range(reader.valid):
                right = (Content(reader.hashes[position], self.weights),) * HALVES
                if reader.copied[HALVES * position : HALVES * (position + 1)] != right:
                    raise ForeignKVError(f"{reader} accepts {reader.valid} blocks")
            reader = replace(reader, copied=(), found=())  # judged: equal to all others that are done
        return self.clone(readers=_put(self.readers, number, reader))


def _put(items: tuple, position: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:position], item, *items[position + 1 :])


def _hash(content: int) -> bytes:
    return content.to_bytes(8, "big")


def explore(world: World) -> int:
    """Visit all states that follow; returns how many there are.

    Raises:
        ForeignKVError: in one of them a reader accepts what it must not.
    """
    seen = {world.key()}
    open_ = [world]
    while open_:
        for successor in open_.pop().successors():
            key = successor.key()
            if key not in seen:
                seen.add(key)
                open_.append(successor)
    return len(seen)


def build_world(
    rules: Rules, *readers: tuple[int, ...], blocks: int = 2, allocations: int = 3, changes: int = 0, restarts: int = 0
) -> World:
    memory = ((None,) * HALVES,) * blocks
    return World(rules, tuple(map(Reader, readers)), allocations, changes, restarts, memory, (None,) * blocks)


@pytest.mark.parametrize(
    ("readers", "bounds"),
    [
        pytest.param([(0,)], {"blocks": 2, "allocations": 4}, id="one block, many allocations"),
        pytest.param([(0, 1)], {"blocks": 2, "allocations": 3}, id="two blocks"),
        pytest.param([(0,), (1,)], {"blocks": 1, "allocations": 3}, id="two readers"),
        pytest.param([(0,)], {"blocks": 2, "allocations": 2, "restarts": 2}, id="restarts"),
        pytest.param([(0,)], {"blocks": 2, "allocations": 2, "changes": 2}, id="weights change"),
        pytest.param([(0, 1)], {"blocks": 2, "allocations": 2, "changes": 1, "restarts": 1}, id="everything"),
    ],
)
def test_no_reader_accepts_foreign_kv(readers: list[tuple[int, ...]], bounds: dict[str, int]) -> None:
    assert explore(build_world(Rules(), *readers, **bounds)) > 1000


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_no_reader_accepts_foreign_kv_from_a_larger_pool(chance: random.Random) -> None:
    world = build_world(Rules(), (0, 1), (1,), (1, 0), (0,), blocks=4, allocations=12, changes=2, restarts=2)
    for _ in range(120):
        successors = list(world.successors())
        if not successors:
            return
        world = chance.choice(successors)


@pytest.mark.parametrize("rule", [item.name for item in fields(Rules)])
def test_every_rule_is_needed(rule: str) -> None:
    changes = 1 if rule in ("clears_with_weights", "drops_what_began_before") else 0
    restarts = 1 if rule == "compares_epochs" else 0
    world = build_world(Rules(**{rule: False}), (0,), blocks=1, allocations=2, changes=changes, restarts=restarts)
    with pytest.raises(ForeignKVError):
        explore(world)
