"""The last lines of a run: the verdicts, for whoever looks at the terminal."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pharos.errors import InputError
from pharos.report.sources import Source, load_sources

MOST_LINES = 12


def closing_lines(promotions: Sequence[str], page: str) -> list[str]:
    """What a run came to: each verdict with the reason that decided, and where the page is.

    Parameters
    ----------
    promotions
        Paths of promotion-gate artifacts. Those that are not there, because something else was
        asked for, are left out. Of more than :data:`MOST_LINES` only the verdicts are counted.
    page
        The path of the report; not named where it is not there.
    """
    there = [path for path in promotions if Path(path).exists()]
    try:
        sources = load_sources(there, "promotion-gate", Path())
    except InputError as error:  # damaged after it was made: no reason to fail a run that is done
        return [f"pharos: {error}"]
    lines = [_line(source) for source in sources]
    if len(lines) > MOST_LINES:
        counts = Counter(source.result["verdict"] for source in sources)
        lines = [f"{len(sources)} adapters: " + ", ".join(f"{v} {n}" for v, n in counts.items())]
    if Path(page).exists():
        lines.append(f"report: {page}")
    return [f"pharos: {line}" for line in lines]


def _line(source: Source) -> str:
    cell = f"{source.model}/{source.task}/seed{source.seed}/{source.variant}"
    return f"{cell}: {source.result['verdict']}. {source.result['reasons'][0]}"
