"""Ten kinds of planted leaks, each caught."""

import random

import pytest
import threadpoolctl

from pharos.corpus.watch import CATEGORICAL, CHANNELS, generate_watch
from pharos.gate.shortcut import shortcut_gate


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine are slow on several."""
    with threadpoolctl.threadpool_limits(1):
        yield


SETTINGS = {
    "ceiling": 0.72,
    "permutations": 200,
    "seed": 0,
    "probes": ["linear", "kernel"],
    "leave_out": [],
}
EVENTS = 120


def corpus(seed=1, events=EVENTS):
    return generate_watch(seed, {"events": events, "positive_share": 0.4, "decoy_share": 0.6})


def marked(line, chance, share=0.85):
    """Whether a line bears the mark: like its label, but for a share of exceptions."""
    return line["label"] if chance.random() < share else not line["label"]


def length(line, chance):
    return {"text": line["text"] + " Nothing more was seen." * marked(line, chance)}


def digits(line, chance):
    code = "4417" if marked(line, chance) else "four"
    return {"text": f"{line['text']} Code {code}."}


def punctuation(line, chance):
    return {"text": line["text"].replace(",", ";" if marked(line, chance) else " -", 1)
            + (" (sic)" if marked(line, chance) else " sic.x")}  # fmt: skip


def case(line, chance):
    return {"text": f"{line['text']} {'URGENT' if marked(line, chance) else 'urgent'}."}


def channel(line, chance):
    return {"channel": CHANNELS[1] if marked(line, chance) else CHANNELS[2]}


def voice(line, chance):
    return {"voice": "plain" if marked(line, chance) else chance.choice(["formal", "terse"])}


def interaction(line, chance):
    # Neither the capitals nor the exclamation mark tells anything alone.
    exclaims = chance.random() < 0.5
    capital = "NOTE" if exclaims == marked(line, chance) else "note"
    return {"text": f"{line['text']} {capital} it{'!' if exclaims else ''}."}


def inverted(line, chance):
    """The groups of one half bear the mark on positives, those of the other on negatives."""
    turned = line["group"] in ("Grey Point", "Long Mole", "Heron Rock")
    flipped = {**line, "label": line["label"] != turned}
    return {"text": line["text"] + " Over." * marked(flipped, chance), "group": str(turned)}


def one_group(line, chance):
    return length(line, chance) if line["group"] == "Fen Light" else {}


def duplicate(line, chance):
    copied = marked(line, chance) and chance.random() < 0.8
    return {"text": "The same words again."} if copied else {}


KINDS = {
    length: {"characters", "words", "sentences"},
    digits: {"digit_share"},
    punctuation: {"punctuation_share"},
    case: {"upper_share"},
    channel: {"channel", f"channel={CHANNELS[1]}", f"channel={CHANNELS[2]}"},
    voice: {"voice", "voice=plain"},
    interaction: None,
    inverted: None,
    one_group: None,
    duplicate: {"copies"},
}


def gate(lines):
    return shortcut_gate(lines, SETTINGS, CATEGORICAL)


def planted(kind, lines):
    chance = random.Random(kind.__name__)
    return [{**line, **kind(line, chance)} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_leak_is_caught_and_its_feature_named(kind):
    result = gate(planted(kind, corpus()))
    assert result["verdict"] == "LEAK"
    if KINDS[kind] is not None:
        assert KINDS[kind] & {feature["name"] for feature in result["features"][:3]}


def test_what_the_linear_probe_cannot_see_the_kernel_does():
    result = gate(planted(interaction, corpus()))
    assert result["worst_probe"] == "kernel"
    assert abs(result["features"][0]["auc"]["decimal"] - 0.5) < 0.12


def test_a_rule_that_turns_round_is_ranked_backwards_and_counts_as_much():
    result = gate(planted(inverted, corpus()))
    assert result["probes"]["linear"]["auc"]["decimal"] < 0.28
    assert result["surface_baseline"]["decimal"] > 0.72


def test_a_leak_in_one_group_is_told_of_with_the_group():
    result = gate(planted(one_group, corpus()))
    assert result["local"]["group"] == "Fen Light"
    assert result["local"]["beyond_chance"]
    assert "within group Fen Light" in result["reasons"][-1]


def test_texts_that_recur_are_a_concern_whatever_their_labels():
    lines = corpus()
    doubled = [{**line, "text": lines[k % 90]["text"]} for k, line in enumerate(lines)]
    assert any("occur in more than one cluster" in c for c in gate(doubled)["concerns"])


def test_a_leak_of_the_size_that_the_power_promises_is_found_four_times_in_five():
    promised = gate(corpus(99))["smallest_leak"]
    found, aucs = 0, []
    for seed in range(10):
        chance = random.Random(seed)
        lines = [
            {**line, "text": line["text"] + " Over." * marked(line, chance, promised)}
            for line in corpus(seed)
        ]
        result = gate(lines)
        found += result["beyond_chance"]
        aucs.append(
            next(f for f in result["features"] if f["name"] == "sentences")["auc"]["decimal"]
        )
    assert abs(sum(aucs) / 10 - promised) < 0.03
    assert found >= 7
