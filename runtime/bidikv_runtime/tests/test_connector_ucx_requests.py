"""UCX's table of allocators is changed when, and only when, it holds what it is known to hold."""

from __future__ import annotations

import shutil
import subprocess
from ctypes import CDLL, c_void_p, cast
from pathlib import Path

import pytest

from bidikv_runtime.connector.ucx_requests import REPLACED, TABLE, ZEROING, zero_requests

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
KNOWN = f"{{{', '.join(REPLACED)}, (f)7}}"


def build_library(folder: Path, table: str, functions: tuple[str, ...] = REPLACED + ZEROING) -> CDLL:
    """A library with these functions and this table."""
    source = "typedef void (*f)(void);\n" + "".join(f"void {name}(void) {{}}\n" for name in functions)
    if table:
        source += f"f {TABLE}[3] = {table};\n"
    (folder / "ucx.c").write_text(source)
    library = folder / "libucx.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "ucx.c")], check=True)
    return CDLL(str(library))


def read_table(library: CDLL) -> list[int | None]:
    return list((c_void_p * 3).in_dll(library, TABLE))


def addresses(library: CDLL, names: tuple[str, ...]) -> list[int | None]:
    return [cast(library[name], c_void_p).value for name in names]


def test_requests_are_zeroed_and_nothing_else_is_changed(tmp_path: Path) -> None:
    library = build_library(tmp_path, KNOWN)
    assert zero_requests(library) is None
    assert read_table(library) == [*addresses(library, ZEROING), 7]


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    library = build_library(tmp_path, KNOWN)
    assert zero_requests(library) is None
    before = read_table(library)
    assert zero_requests(library) is None
    assert read_table(library) == before


@pytest.mark.parametrize(
    "table", ["{(f)1, (f)2, (f)7}", f"{{{REPLACED[0]}, (f)2, (f)7}}", f"{{{REPLACED[1]}, {REPLACED[0]}}}"]
)
def test_another_table_is_left_alone(tmp_path: Path, table: str) -> None:
    library = build_library(tmp_path, table)
    before = read_table(library)
    reason = zero_requests(library)
    assert reason is not None
    assert "allocates its requests differently" in reason
    assert read_table(library) == before


def test_a_ucx_without_the_allocator_is_left_alone(tmp_path: Path) -> None:
    library = build_library(tmp_path, KNOWN, REPLACED)
    before = read_table(library)
    reason = zero_requests(library)
    assert reason is not None
    assert ZEROING[0] in reason
    assert read_table(library) == before


def test_a_library_without_the_table_is_named_as_such(tmp_path: Path) -> None:
    reason = zero_requests(build_library(tmp_path, ""))
    assert reason is not None
    assert TABLE in reason
