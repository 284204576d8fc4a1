"""The demo's result: medians over conversations, as a table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from e2e.demo.workload import Measured


def summarise(off: Sequence[Measured], on: Sequence[Measured], cluster: dict[str, str]) -> dict[str, Any]:
    """The content of ``build/demo.json``; ``off`` and ``on`` hold the same conversations and turns.

    ``reused_tokens`` and ``prefill_hit_tokens`` are of the run with reuse; the ratio is TTFT off / on.
    """
    turns = []
    for turn in sorted({m.turn for m in on}):
        these_off = [m for m in off if m.turn == turn]
        these_on = [m for m in on if m.turn == turn]
        turns.append(
            {
                "turn": turn,
                "prompt_tokens": int(median(m.prompt_tokens for m in these_on)),
                "ttft_off_s": round(median(m.ttft_s for m in these_off), 3),
                "ttft_on_s": round(median(m.ttft_s for m in these_on), 3),
                "reused_tokens": int(median(m.reused_tokens for m in these_on)),
                "prefill_hit_tokens": int(median(m.prefill_hit_tokens for m in these_on)),
            }
        )
    texts_off = {(m.conversation, m.turn): m.text for m in off}
    texts_on = {(m.conversation, m.turn): m.text for m in on}
    return {
        "turns": turns,
        "ratio_last_turn": round(turns[-1]["ttft_off_s"] / turns[-1]["ttft_on_s"], 2),
        "outputs_equal": texts_off == texts_on and bool(texts_on),
        "cluster": cluster,
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        "turn   prompt tokens   TTFT reuse off   TTFT reuse on   ratio   tokens read from decode",
        "----   -------------   --------------   -------------   -----   -----------------------",
    ]
    for t in result["turns"]:
        ratio = t["ttft_off_s"] / t["ttft_on_s"]
        lines.append(
            f"{t['turn']:>4}   {t['prompt_tokens']:>13,}   {t['ttft_off_s']:>12.2f} s   {t['ttft_on_s']:>11.2f} s   "
            f"{ratio:>4.1f}x   {t['reused_tokens']:>23,}"
        )
    equal = "equal" if result["outputs_equal"] else "NOT equal"
    lines.append(f"Texts with and without reuse: {equal}.")
    return "\n".join(lines)
