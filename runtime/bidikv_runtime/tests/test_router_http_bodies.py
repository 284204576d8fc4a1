"""Memory of bodies is used again, but never while anybody can still see the old one."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.http.bodies import BodyMemory

SIZE = 1024 * 1024


def test_memory_is_used_again_for_a_body_of_about_the_same_size() -> None:
    for first, second in ((SIZE, SIZE), (SIZE, SIZE * 2 // 3), (SIZE * 2 // 3, SIZE)):
        memory = BodyMemory()
        body = memory.take(first)
        identity = id(body)
        memory.keep(body)
        del body
        again = memory.take(second)
        assert (id(again), len(again)) == (identity, second)
        assert id(memory.take(second)) != identity


def test_small_and_very_large_bodies_are_left_to_the_allocator() -> None:
    for size in (1000, 16 * SIZE):
        memory = BodyMemory()
        memory.keep(memory.take(size))
        assert memory.kept_bytes == 0
    memory.keep(b"x" * SIZE)  # arrived in one segment, or a response's
    assert memory.kept_bytes == 0


def test_what_is_kept_is_bounded() -> None:
    memory = BodyMemory()
    for body in [memory.take(SIZE) for _ in range(100)]:
        memory.keep(body)
    assert 0 < memory.kept_bytes <= 8 * SIZE


def test_a_view_of_any_kind_keeps_the_memory_from_being_used() -> None:
    text = b'{"messages":"' + b"x" * SIZE + b'"}'
    for look in (
        lambda body: body,
        memoryview,
        lambda body: memoryview(body)[10:20],
        lambda body: msgspec.json.decode(body, type=dict[str, msgspec.Raw])["messages"],
        lambda body: memoryview(msgspec.json.decode(body, type=dict[str, msgspec.Raw])["messages"])[1:5],
    ):
        memory = BodyMemory()
        body = memory.take(len(text))
        body[:] = text
        identity = id(body)
        view = look(body)
        memory.keep(body)
        del body
        assert id(memory.take(len(text))) != identity
        del view
        assert id(memory.take(len(text))) == identity


@given(st.lists(st.tuples(st.sampled_from(["take", "keep", "view", "forget"]), st.integers(0, 9)), max_size=60))
def test_no_two_users_ever_share_memory(steps: list[tuple[str, int]]) -> None:
    memory, used, views = BodyMemory(), list[bytearray](), list[memoryview]()
    for step, index in steps:
        if step == "take":
            body = memory.take(200_000 + 20_000 * index)
            assert all(body is not other for other in used)
            assert all(body is not view.obj for view in views)
            used.append(body)
            del body
        elif step == "keep" and used:
            memory.keep(used.pop(index % len(used)))
        elif step == "view" and used:
            views.append(memoryview(used[index % len(used)]))
        elif step == "forget" and views:
            del views[index % len(views)]
