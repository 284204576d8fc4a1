"""What the samples say: ratios of turns in the same round, and what the router's own choice cost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from e2e.bench.paths.plan import BIDIRECTIONAL, CHOSEN, FORCED, LOCAL, PLAIN, Gap, Sample


@dataclass(frozen=True)
class Spread:
    """Of one value per round."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Cell:
    """All rounds of one size of history and of one number of new tokens."""

    history: int
    new: int
    prompt_tokens: int
    """Median."""
    first_token_s: dict[str, Spread]
    """By variant."""
    bidirectional_to_local: Spread
    """How many times as long a turn takes with a prefill leg as with decode alone."""
    plain_to_bidirectional: Spread
    choices: dict[str, int]
    """Rounds by what the router chose and why, as ``local, held``."""
    regret_s: float
    """Mean over rounds of: the chosen path, forced in the same round, less the fastest forced one. Measured with forced
    turns only, so that luck of the chosen turn itself does not count; 0 when every choice was the best of its round."""
    regret_share: float
    """The same as a share of the fastest forced path's mean."""


@dataclass(frozen=True)
class Stall:
    """Turns of one kind beside a stream."""

    new: int
    variant: str
    choices: dict[str, int]
    first_token_s: Spread
    quiet_gap_s: Spread
    gap_s: Spread


def spread(values: Iterable[float]) -> Spread:
    """Raises ``statistics.StatisticsError`` when there are none."""
    found = list(values)
    return Spread(median(found), min(found), max(found))


def build_cells(samples: Sequence[Sample]) -> list[Cell]:
    """One per size, in the order of the samples.

    Raises:
        KeyError: a round lacks a variant.
    """
    sizes = dict.fromkeys((sample.history, sample.new) for sample in samples)
    return [_build_cell([s for s in samples if (s.history, s.new) == size]) for size in sizes]


def _build_cell(samples: Sequence[Sample]) -> Cell:
    rounds: dict[int, dict[str, Sample]] = {}
    for sample in samples:
        rounds.setdefault(sample.round, {})[sample.variant] = sample
    paired = list(rounds.values())
    best = [min(each[path].first_token_s for path in FORCED) for each in paired]
    regrets = [each[each[CHOSEN].path].first_token_s - least for each, least in zip(paired, best, strict=True)]
    first = samples[0]
    return Cell(
        first.history,
        first.new,
        round(median(sample.prompt_tokens for sample in samples)),
        {variant: spread(each[variant].first_token_s for each in paired) for variant in (*FORCED, CHOSEN)},
        _compute_ratios(paired, BIDIRECTIONAL, LOCAL),
        _compute_ratios(paired, PLAIN, BIDIRECTIONAL),
        _count_choices(each[CHOSEN] for each in paired),
        mean(regrets),
        mean(regrets) / mean(best),
    )


def _compute_ratios(paired: Iterable[Mapping[str, Sample]], of: str, to: str) -> Spread:
    return spread(each[of].first_token_s / each[to].first_token_s for each in paired)


def _count_choices(chosen: Iterable[Sample | Gap]) -> dict[str, int]:
    return dict(Counter(f"{each.path}, {each.reason}" for each in chosen).most_common())


def build_stalls(gaps: Sequence[Gap]) -> list[Stall]:
    """One per kind of turn, in the order of the gaps."""
    kinds = sorted({(gap.new, gap.variant) for gap in gaps})
    stalls = []
    for kind in kinds:
        found = [gap for gap in gaps if (gap.new, gap.variant) == kind]
        stalls.append(
            Stall(
                *kind,
                _count_choices(found),
                spread(gap.first_token_s for gap in found),
                spread(gap.quiet_gap_s for gap in found),
                spread(gap.gap_s for gap in found),
            )
        )
    return stalls


def build_tables(cells: Sequence[Cell], stalls: Sequence[Stall]) -> str:
    """Two tables in Markdown; times in milliseconds, medians, with least and most for ratios and gaps."""
    lines = [
        "| history | new | local | bidirectional | plain | bidirectional/local | plain/bidirectional | chosen | choice "
        "| regret |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for cell in cells:
        times = [f"{cell.first_token_s[path].median * 1e3:,.0f}" for path in FORCED]
        lines.append(
            f"| {cell.history:,} | {cell.new} | {' | '.join(times)} | {_format(cell.bidirectional_to_local)} "
            f"| {_format(cell.plain_to_bidirectional)} | {cell.first_token_s[CHOSEN].median * 1e3:,.0f} "
            f"| {_format_choices(cell.choices)} | {cell.regret_s * 1e3:,.0f} ({cell.regret_share:.0%}) |"
        )
    lines += [
        "",
        "| beside a stream: new | asked for | took | TTFT | longest gap before | longest gap meanwhile |",
        "| ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for stall in stalls:
        lines.append(
            f"| {stall.new} | {stall.variant} | {_format_choices(stall.choices)} "
            f"| {stall.first_token_s.median * 1e3:,.0f} | {_format(stall.quiet_gap_s, 1e3, 0)} "
            f"| {_format(stall.gap_s, 1e3, 0)} |"
        )
    return "\n".join(lines)


def _format(value: Spread, scale: float = 1.0, digits: int = 2) -> str:
    middle, least, most = (f"{number * scale:,.{digits}f}" for number in (value.median, value.least, value.most))
    return f"{middle} ({least}-{most})"


def _format_choices(choices: Mapping[str, int]) -> str:
    if len(choices) == 1:
        return next(iter(choices))
    return "; ".join(f"{count} {choice}" for choice, count in choices.items())
