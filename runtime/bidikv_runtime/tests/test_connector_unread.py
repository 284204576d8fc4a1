"""What would be lost with an engine: sessions that nobody has taken over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.sessions import Sessions, build_turn
from bidikv_runtime.connector.unread import ASKED_SECONDS, LEAST_TOKENS, UnreadSessions

BLOCK = 16
BLOCKS = LEAST_TOKENS // BLOCK
IDLE = 100.0


class Engine:
    """A table of sessions, and its index; the session ``s1`` has the blocks 1000 to 1999."""

    def __init__(self, limit: int = 100) -> None:
        self.index = PublicationIndex()
        self.sessions = Sessions(self.index, BLOCK, limit)
        self.sessions.unread.idle_seconds = IDLE
        self.now = 0.0

    def end_turn(self, number: int, blocks: int = BLOCKS, *, is_last: bool = False) -> None:
        hashes = [b"%d/%d" % (number, block) for block in range(blocks)]
        self.index.publish(hashes, [1000 * number + block for block in range(blocks)])
        tokens = blocks * BLOCK
        self.sessions.end_turn(build_turn(f"s{number}", tokens, tokens, 0, hashes, self.now, is_last))

    def ask(self, number: int) -> None:
        self.sessions.note_interest(f"s{number}", self.now, has_read=False)

    def read(self, number: int) -> None:
        self.sessions.note_interest(f"s{number}", self.now, has_read=True)

    def count(self) -> int:
        self.sessions.collect(0)
        return self.sessions.unread.count(self.now)


def test_a_session_is_unread_until_another_engine_has_read_it() -> None:
    engine = Engine()
    engine.end_turn(1)
    engine.end_turn(2)
    assert engine.count() == 2
    engine.ask(1)
    assert engine.count() == 2, "the read is under way"
    engine.read(1)
    assert engine.count() == 1
    engine.read(7)
    assert engine.count() == 1, "nobody's"


def test_a_further_turn_makes_it_unread_again_whether_or_not_anybody_has_looked_meanwhile() -> None:
    engine = Engine()
    for looks in (False, True):
        engine.end_turn(1)
        engine.read(1)
        if looks:
            assert engine.count() == 0
        engine.end_turn(1)
        assert engine.count() == 1
        engine.read(1)
        assert engine.count() == 0


def test_who_has_asked_and_reads_nothing_does_not_need_it() -> None:
    engine = Engine()
    engine.end_turn(1)
    engine.ask(1)
    engine.count()
    engine.now += ASKED_SECONDS - 1
    engine.ask(1)  # asking again does not prolong it
    assert engine.count() == 1
    engine.now += 1
    assert engine.count() == 0


def test_a_question_of_before_the_turn_says_nothing() -> None:
    engine = Engine()
    engine.end_turn(1)
    engine.ask(1)
    engine.end_turn(1)
    engine.now += ASKED_SECONDS
    assert engine.count() == 1


def test_a_session_that_is_over_idle_short_or_evicted_is_no_loss() -> None:
    engine = Engine()
    engine.end_turn(1, is_last=True)
    engine.end_turn(2, BLOCKS - 1)
    assert engine.count() == 0
    engine.end_turn(3)
    engine.now += IDLE / 2
    engine.end_turn(4)
    assert engine.count() == 2
    engine.now += IDLE / 2
    assert engine.count() == 1
    engine.index.unpublish([4000 + BLOCKS - 1])
    assert engine.count() == 0
    engine.end_turn(5)
    engine.end_turn(5, is_last=True)
    assert engine.count() == 0


def test_what_the_table_forgets_is_not_waited_for() -> None:
    engine = Engine(limit=2)
    for number in range(5):
        engine.end_turn(number)
        engine.count()
    assert engine.count() == 2


@given(st.lists(st.tuples(st.sampled_from(["turn", "ask", "forget", "wait"]), st.integers(0, 3))))
def test_it_agrees_with_its_definition(steps: list[tuple[str, int]]) -> None:
    unread, now = UnreadSessions(IDLE), 0.0
    ended: dict[str, float] = {}
    asked: dict[str, float] = {}
    for step, number in steps:
        name = f"s{number}"
        if step == "wait":
            now += number * ASKED_SECONDS / 2
        elif step == "turn":
            unread.end_turn(name, now)
            ended[name] = now
            asked.pop(name, None)
        elif step == "ask":
            unread.note_question(name, now)
            if name in ended:
                asked.setdefault(name, now)
        else:
            unread.forget(name)
            ended.pop(name, None)
            asked.pop(name, None)
        for other in list(ended):
            if now - ended[other] >= IDLE or now - asked.get(other, now) >= ASKED_SECONDS:
                del ended[other]
                asked.pop(other, None)
        assert unread.count(now) == len(ended)
