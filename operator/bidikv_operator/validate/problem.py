"""What validation says about a mistake."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake: the field, and a sentence that says what to do."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(frozen=True)
class Rejected:
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


Problems = list[Problem]
