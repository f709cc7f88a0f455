"""How much text a task is, in tokens, told from its configuration and a sample of its texts.

Tokens are estimated from bytes: the tokenizer of a model that is not fetched yet is not at hand,
and planning must not take long.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from pharos.corpus.items import items_of
from pharos.corpus.tables import read_rows
from pharos.corpus.watch import generate_watch
from pharos.models.memory import Prompts

# UTF-8 bytes a token: 3.23 for the watch corpus under SmolLM2's tokenizer (49,152 words). Larger
# vocabularies need fewer tokens, so that this errs upwards.
BYTES_PER_TOKEN = 3.2
# What a chat template puts around the turns: 7 tokens for SmolLM2, a line on dates for others.
TEMPLATE_TOKENS = 20
SAMPLE_EVENTS = 100
SAMPLE_ROWS = 2000
# The longest text of a file is longer than the longest of a sample.
BEYOND_SAMPLE = 1.5


def task_prompts(task: Mapping[str, Any], events: int) -> Prompts:
    """The prompts of the ``events`` events of a task's corpus that one job reads.

    Raises
    ------
    InputError
        If the corpus is a file that cannot be read.
    """
    prompt = task["prompt"]
    texts, events_sampled = _sample(task)
    before = prompt["template"].partition("{text}")[0]
    around = prompt["system"] + prompt["template"].replace("{text}", "")
    fixed = _tokens(around) + TEMPLATE_TOKENS
    lengths = [fixed + _tokens(text) for text in texts]
    answers = [math.ceil(_tokens(answer)) for answer in prompt["answers"].values()]
    longest = max(lengths)
    if "file" in task["corpus"]:
        longest = fixed + BEYOND_SAMPLE * (longest - fixed)
    return Prompts(
        count=round(events * len(texts) / events_sampled),
        mean=statistics.mean(lengths),
        longest=math.ceil(longest),
        shared=int(_tokens(prompt["system"] + before) + TEMPLATE_TOKENS / 2),
        answer=max(answers),
        both=sum(answers),
        deviation=statistics.pstdev(lengths),
    )


def _tokens(text: str) -> float:
    return len(text.encode()) / BYTES_PER_TOKEN


def _sample(task: Mapping[str, Any]) -> tuple[list[str], int]:
    """Texts of items from the front of a corpus, and how many events they are of."""
    corpus = task["corpus"]
    if "generator" in corpus:
        lines: Sequence[Mapping[str, Any]] = generate_watch(
            task["seeds"]["test"][0], {**corpus, "events": min(SAMPLE_EVENTS, corpus["events"])}
        )
    else:
        columns = corpus["columns"]
        rows = islice(read_rows(corpus["file"]), SAMPLE_ROWS)
        lines = [
            {
                "id": str(number),
                "text": str(row.get(columns.get("text", "text"), "")),
                "cluster": str(row.get(columns.get("cluster", "cluster"), number)),
                "group": "",
                "label": False,
            }
            for number, row in rows
        ]
    items = items_of(lines, task["prompt"]["unit"])
    return [item.text for item in items], len({item.cluster for item in items})
