"""What a verdict of the shortcut gate means for the jobs behind it."""

import pytest

from pharos.errors import CheckFailed
from pharos.gate.admission import admit

GATE = {
    "verdict": "LEAK",
    "reasons": ["labels can be told from shape alone: AUC 0.800, ceiling 0.720"],
    "surface_baseline": {"hex": "0x1.999999999999ap-1", "decimal": 0.8},
}


def test_a_leaking_corpus_stops_and_says_why_and_what_to_do():
    with pytest.raises(CheckFailed, match=r"AUC 0\.800, .*see gate\.json; .*enforce: false"):
        admit(GATE, enforce=True, where="gate.json")


def test_a_leaking_corpus_goes_on_with_a_warning_where_the_gate_is_not_enforced(capsys):
    admitted = admit(GATE, enforce=False, where="gate.json")
    assert (admitted["verdict"], admitted["enforced"]) == ("LEAK", False)
    assert "going on" in capsys.readouterr().err


@pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE"])
def test_other_verdicts_are_admitted(verdict):
    gate = {**GATE, "verdict": verdict}
    assert admit(gate, enforce=True, where="gate.json")["verdict"] == verdict
