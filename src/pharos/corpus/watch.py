"""A fictional watch service, and the corpus of its reports.

An event is significant exactly when the three facts of :data:`RULE` co-occur in it. It has five
facts out of fifteen and three short reports of two facts each, so one fact is told twice. Reports
differ in nothing but their facts: every fact has the same number of characters, words, capitals,
digits and punctuation marks, and everything around the facts comes from a stream of its own that
does not know the label. No property of the shape of a text can therefore depend on the label.
"""

from collections.abc import Mapping
from typing import Any

from pharos.corpus.stream import Stream

# All of 21 letters and spaces and 4 words, each with a first word of its own.
FACTS = (
    "lamps turned deep red",
    "tide stood very still",
    "nets came aboard torn",
    "smoke hid the harbour",
    "boatmen cut the ropes",
    "bells rang until noon",
    "cranes swung too wide",
    "divers found old iron",
    "ferry crews went home",
    "ice covered the pumps",
    "fog reached the tower",
    "dogs barked near dawn",
    "oil stained the rocks",
    "clocks gained an hour",
    "sails were dyed black",
)
RULE = frozenset(FACTS[:3])
OTHERS = tuple(fact for fact in FACTS if fact not in RULE)
FACTS_AN_EVENT = 5
REPORTS_AN_EVENT = 3

STATIONS = ("Grey Point", "Long Mole", "Heron Rock", "Salt Gate", "Fen Light", "West Cairn")
CHANNELS = ("harbour log", "radio call", "patrol note", "shore letter")
VOICES = {
    "terse": "{Channel} {time}, {station}, wind {wind} knots: {first}; {second}.",
    "plain": "At {station}, {time}, by {channel}, wind {wind} knots: {first} and {second}.",
    "formal": "The {channel} of {station} at {time}, wind {wind} knots, says {first} and {second}.",
}
CATEGORICAL = ("channel", "voice")


def generate_watch(seed: int, corpus: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Generate the reports of ``corpus["events"]`` events.

    Parameters
    ----------
    seed
        The corpus seed. Event ``k`` depends on ``seed``, ``k`` and the two shares only, so a
        corpus of fewer events is an exact prefix of one with more.
    corpus
        ``events``; ``positive_share``, the probability that an event is significant; and
        ``decoy_share``, the probability that another event holds two of the rule's three facts
        (else it holds at most one).

    Returns
    -------
    Corpus lines, three an event, with the categorical columns ``channel`` and ``voice``.
    """
    shares = float(corpus["positive_share"]), float(corpus["decoy_share"])
    return [line for event in range(int(corpus["events"])) for line in _event(seed, event, *shares)]


def _event(
    seed: int, event: int, positive_share: float, decoy_share: float
) -> list[dict[str, Any]]:
    label, pairs = _facts(Stream("watch", seed, event, "facts"), positive_share, decoy_share)
    frame = Stream("watch", seed, event, "frame")
    station = frame.choice(STATIONS)
    minute = frame.below(24 * 60)
    lines = []
    for number, (first, second) in enumerate(pairs, start=1):
        channel = frame.choice(CHANNELS)
        voice = frame.choice(tuple(VOICES))
        text = VOICES[voice].format(
            Channel=channel.capitalize(),
            channel=channel,
            station=station,
            time=f"{minute // 60:02d}{minute % 60:02d}",
            wind=3 + frame.below(30),
            first=first,
            second=second,
        )
        minute = (minute + 4 + frame.below(50)) % (24 * 60)
        lines.append(
            {
                "id": f"e{event:05d}-{number}",
                "text": text,
                "label": label,
                "group": station,
                "cluster": f"e{event:05d}",
                "channel": channel,
                "voice": voice,
            }
        )
    return lines


def _facts(
    stream: Stream, positive_share: float, decoy_share: float
) -> tuple[bool, list[tuple[str, str]]]:
    """The label of an event, and the two facts of each of its three reports."""
    label = stream.happens(positive_share)
    decoy = stream.happens(decoy_share)
    one_of_rule = stream.happens(0.5)
    if label:
        of_rule = len(RULE)
    elif decoy:
        of_rule = len(RULE) - 1
    else:
        of_rule = int(one_of_rule)
    facts = stream.sample(sorted(RULE), of_rule)
    facts += stream.sample(OTHERS, FACTS_AN_EVENT - of_rule)
    facts = stream.shuffled(facts)
    # The fact told twice comes first; its second telling goes to another report, by position.
    told = [facts[0], facts[1], facts[0], facts[2], facts[3], facts[4]]
    pairs = [(told[k], told[k + 1]) for k in (0, 2, 4)]
    first, second, third = (tuple(stream.shuffled(pair)) for pair in stream.shuffled(pairs))
    return label, [(first[0], first[1]), (second[0], second[1]), (third[0], third[1])]


def facts_in(text: str) -> set[str]:
    """The facts that a text tells, read off the words alone."""
    return {fact for fact in FACTS if fact in text}
