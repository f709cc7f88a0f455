"""Small figures as inline SVG.

Positions across are percentages and everything else is in pixels, so that one figure fits a
desk and a phone without its letters shrinking. Colours are classes of the page's style sheet, so
that they follow light and dark. The same data give the same text.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

TRIANGLE = "M-5.5 -4.5h11L0 5z"


def interval_strip(
    value: float, low: float, high: float, floors: Mapping[str, float], label: str
) -> Markup:
    """A value with its interval on the axis 0 to 1; each floor is a dashed tick.

    The dot is filled when the interval lies above every floor, hollow when it reaches one; a
    triangle that points down when it lies below one.

    Parameters
    ----------
    value, low, high
        In 0 to 1.
    floors
        What each floor is called, and where it is.
    label
        What a screen reader says for the whole strip.
    """
    if any(high < floor for floor in floors.values()):
        state, mark = "below", '<svg x="{value}" y="10"><path class="dot" d="{triangle}"/></svg>'
    else:
        state = "clear" if all(low > floor for floor in floors.values()) else "unclear"
        mark = '<circle class="dot" cx="{value}" cy="10" r="4.5"/>'
    ticks = Markup("").join(
        Markup(
            '<line class="floor" x1="{x}" x2="{x}" y1="1" y2="19"><title>{what}</title></line>'
        ).format(x=_percent(floor), what=f"{what} {floor:.3f}")
        for what, floor in floors.items()
    )
    return Markup(
        '<svg class="strip {state}" role="img" aria-label="{label}" width="100%" height="20">'
        '<line class="track" x1="0" x2="100%" y1="10" y2="10"/>{ticks}'
        '<line class="interval" x1="{low}" x2="{high}" y1="10" y2="10"/>'
        f"{mark}</svg>"
    ).format(
        state=state,
        triangle=TRIANGLE,
        label=label,
        ticks=ticks,
        low=_percent(low),
        high=_percent(high),
        value=_percent(value),
    )


def null_histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    observed: float,
    ceiling: float,
    label: str,
) -> Markup:
    """How often shuffled labels gave each AUC, with the observed value and the ceiling.

    Parameters
    ----------
    edges
        Bin edges, ascending, one more than ``counts``.
    counts
        Shuffles in each bin.
    observed, ceiling
        AUCs, both at least 0.5.
    label
        What a screen reader says for the whole figure.
    """
    top, base = 52, 190
    start = min(0.5, edges[0])
    stop = min(1.0, max(ceiling, observed, edges[-1]) + 0.03)

    def across(auc: float) -> float:
        return (auc - start) / (stop - start)

    tallest = max([*counts, 1])
    bars = Markup("").join(
        Markup(
            '<rect class="bar" x="{x}" width="{width}" y="{y}" height="{height}">'
            "<title>{count} shuffles with AUC {low:.3f} to {high:.3f}</title></rect>"
        ).format(
            x=_percent(across(low)),
            width=_percent(across(high) - across(low)),
            y=_pixels(base - (base - top) * count / tallest),
            height=_pixels((base - top) * count / tallest),
            count=count,
            low=low,
            high=high,
        )
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    )
    marks = Markup("").join(
        Markup(
            '<line class="{kind}" x1="{x}" x2="{x}" y1="{y}" y2="{base}"/>'
            '<text class="{kind}-label" x="{x}" y="{above}" dx="{dx}" text-anchor="{anchor}">'
            "{text}</text>"
        ).format(
            kind=kind,
            x=_percent(across(auc)),
            y=y,
            base=base,
            above=y + 11,
            dx=6 if across(auc) < 0.5 else -6,
            anchor="start" if across(auc) < 0.5 else "end",
            text=f"{name} {auc:.3f}",
        )
        for kind, name, auc, y in (
            ("observed", "this corpus", observed, 8),
            ("ceiling", "ceiling", ceiling, 28),
        )
    )
    ticks = _ticks_across(_nice_ticks(start, stop, 5), across, base, lambda auc: f"{auc:.2f}")
    return Markup(
        '<svg class="chart" role="img" aria-label="{label}" width="100%" height="216">'
        '<line class="axis" x1="0" x2="100%" y1="{base}" y2="{base}"/>{bars}{ticks}{marks}</svg>'
    ).format(label=label, base=base, bars=bars, ticks=ticks, marks=marks)


def loss_curve(steps: Sequence[float], losses: Sequence[float], label: str) -> Markup:
    """Training loss at each step, thin, and its running mean, strong.

    Parameters
    ----------
    steps
        Ascending, at least one.
    losses
        As many, finite.
    label
        What a screen reader says for the whole figure.
    """
    top, base = 22, 190
    first, last = float(steps[0]), float(steps[-1])
    highest = max(*losses, 1e-9) * 1.05

    def across(step: float) -> float:
        return (step - first) / (last - first) if last > first else 0.5

    def height(loss: float) -> float:
        return top + (base - top) * (1 - loss / highest)

    def path(values: Sequence[float]) -> str:
        # The nested figure is stretched to the width; 1000 units across keep the path short.
        points = (
            f"{_pixels(1000 * across(step))} {_pixels(height(value))}"
            for step, value in zip(steps, values, strict=True)
        )
        return "M" + "L".join(points)

    levels = Markup("").join(
        Markup(
            '<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            '<text class="tick" x="100%" y="{above}" text-anchor="end">{text}</text>'
        ).format(y=_pixels(height(level)), above=_pixels(height(level) - 4), text=f"{level:g}")
        for level in _nice_ticks(0, highest, 4)
        if level > 0
    )
    ticks = _ticks_across(_nice_ticks(first, last, 5), across, base, lambda step: f"{step:g}")
    return Markup(
        '<svg class="chart" role="img" aria-label="{label}" width="100%" height="230">{levels}'
        '<text class="axis-name" x="0" y="11">loss</text>'
        '<text class="axis-name" x="50%" y="226" text-anchor="middle">step</text>'
        '<line class="axis" x1="0" x2="100%" y1="{base}" y2="{base}"/>'
        '<svg width="100%" height="216" viewBox="0 0 1000 216" preserveAspectRatio="none">'
        '<path class="raw" d="{raw}"/><path class="smooth" d="{smooth}"/></svg>{ticks}</svg>'
    ).format(
        label=label,
        levels=levels,
        base=base,
        raw=path(losses),
        smooth=path(running_mean(losses)),
        ticks=ticks,
    )


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean over a centred window of a tenth of the values, narrower at the ends."""
    half = max(1, len(values) // 20)
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def _ticks_across(
    ticks: Sequence[float],
    across: Callable[[float], float],
    base: int,
    text: Callable[[float], str],
) -> Markup:
    def anchor(place: float) -> str:
        return "start" if place < 0.03 else "end" if place > 0.97 else "middle"

    return Markup("").join(
        Markup('<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>').format(
            x=_percent(across(tick)), y=base + 18, anchor=anchor(across(tick)), text=text(tick)
        )
        for tick in ticks
    )


def _nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.2f}%"


def _pixels(length: float) -> str:
    return f"{length:.1f}"
