"""What the training and the test of a model must not share."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pharos.corpus.items import Item, held_out_items, train_items
from pharos.errors import CheckFailed

# A few equal texts happen in real corpora; more of them mean that the split leaks.
MAX_OVERLAP = 0.01


def check_contamination(
    train: Sequence[Item], test: Sequence[Item], same_corpus: bool
) -> tuple[list[Item], dict[str, Any]]:
    """Take out of ``train`` what the test will ask.

    Parameters
    ----------
    train, test
        The items of either side.
    same_corpus
        Whether both come from one corpus, so that an equal cluster is the same event (names of
        clusters recur from one seed to the next).

    Returns
    -------
    The training items whose text no test item has, and for the record ``{"train", "test",
    "same_text", "first"}``: how many items there were, how many were dropped, and the id of the
    first of these (``None`` for none).

    Raises
    ------
    CheckFailed
        If both sides share a cluster of one corpus, or if more than 1 % of the training items
        have the text of a test item.
    """
    if same_corpus:
        asked = {item.cluster for item in test}
        shared = [item.cluster for item in train if item.cluster in asked]
        if shared:
            raise CheckFailed(
                f"training and test share {len(set(shared))} clusters, the first is {shared[0]!r}"
            )
    texts = {_text_digest(item) for item in test}
    known = [item for item in train if _text_digest(item) in texts]
    if len(known) > MAX_OVERLAP * len(train):
        raise CheckFailed(
            f"{len(known)} of {len(train)} training items have the text of a test item, the first "
            f"is {known[0].id!r}; at most {MAX_OVERLAP:.0%} may. Leave copies out of the corpus, "
            "or give equal texts one cluster, so that they stay on one side"
        )
    dropped = {item.id for item in known}
    facts = {
        "train": len(train),
        "test": len(test),
        "same_text": len(known),
        "first": known[0].id if known else None,
    }
    return [item for item in train if item.id not in dropped], facts


def check_split(lines: Sequence[Mapping[str, Any]], split: Mapping[str, Any], where: str) -> None:
    """Make sure that a corpus can be trained on and tested with: :func:`check_contamination`.

    ``lines`` are those of the corpus ``where``; ``split`` has ``unit``, ``train_events`` and
    ``test_events``.
    """
    train = train_items(lines, split["unit"], split["train_events"])
    test = held_out_items(lines, split["unit"], split["test_events"])
    try:
        check_contamination(train, test, same_corpus=True)
    except CheckFailed as error:
        raise CheckFailed(f"{where}: {error}") from None


def _text_digest(item: Item) -> str:
    return hashlib.sha256(item.text.encode()).hexdigest()
