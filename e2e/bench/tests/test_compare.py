"""What counts as the same answer."""

from __future__ import annotations

import pytest

from e2e.bench.compare import Verdict, compare, compute_distance
from e2e.engine.client import Completion

SURE = {"a": -0.1, "b": -3.0}
TIED = {"a": -0.7, "b": -0.7004}
TIED_OTHERWISE = {"b": -0.7, "a": -0.7004}


def answer(*positions: dict[str, float], finish: str = "length") -> Completion:
    """The likeliest token at each position."""
    text = "".join(max(p, key=p.__getitem__) for p in positions)
    return Completion(text, [ord(c) for c in text], list(positions), finish)


@pytest.mark.parametrize(
    ("got", "expected", "verdict", "agreeing"),
    [
        pytest.param(answer(SURE, SURE), answer(SURE, SURE), Verdict.SAME, 2, id="equal"),
        pytest.param(answer(), answer(), Verdict.SAME, 0, id="empty"),
        pytest.param(answer({"a": -0.1005, "b": -3.0}), answer(SURE), Verdict.SAME, 1, id="within the tolerance"),
        pytest.param(answer({"a": -0.102, "b": -3.0}), answer(SURE), Verdict.WRONG, 1, id="equal tokens of other KV"),
        pytest.param(answer(SURE, TIED), answer(SURE, TIED_OTHERWISE), Verdict.TIE, 1, id="tie"),
        pytest.param(answer(SURE, TIED, SURE), answer(SURE, TIED_OTHERWISE, TIED), Verdict.TIE, 1, id="after a tie"),
        pytest.param(answer(SURE, {"b": -0.1, "a": -3}), answer(SURE, SURE), Verdict.WRONG, 1, id="another token"),
        pytest.param(answer(SURE, TIED), answer(SURE, {"b": -0.1, "a": -3}), Verdict.WRONG, 1, id="tied in one only"),
        pytest.param(
            answer({"a": -0.2, "b": -3}, TIED), answer(SURE, TIED_OTHERWISE), Verdict.WRONG, 1, id="tie later"
        ),
        pytest.param(answer(SURE), answer(SURE, SURE), Verdict.WRONG, 1, id="too short"),
        pytest.param(answer(SURE), answer(SURE, finish="stop"), Verdict.WRONG, 1, id="another end"),
        pytest.param(Completion("a", [97], []), answer(SURE), Verdict.WRONG, 1, id="without log-probabilities"),
    ],
)
def test_verdicts(got: Completion, expected: Completion, verdict: Verdict, agreeing: int) -> None:
    found = compare(got, expected)
    assert (found.verdict, found.agreeing) == (verdict, agreeing)
    assert compare(expected, got).verdict is verdict or not got.top_logprobs


def test_distance_counts_common_tokens_and_needs_the_likeliest() -> None:
    assert compute_distance({"a": -1.0, "b": -2.0}, {"a": -1.5, "c": -9.0}) == 0.5
    assert compute_distance({"a": -1.0}, {"c": -1.0}) == float("inf")
    assert compute_distance({}, {"c": -1.0}) == float("inf")
