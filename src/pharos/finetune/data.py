"""Training examples as tokens, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass

from pharos.corpus.items import Item
from pharos.corpus.stream import Stream
from pharos.errors import InputError
from pharos.evaluate.prompts import PromptBuilder
from pharos.runtime.artifacts import digest_of
from pharos.runtime.log import warn

LISTED_IDS = 5


@dataclass(frozen=True)
class Example:
    """One prompt with its answer.

    ``ids`` are the tokens of prompt, answer and end token; the first ``prompt_length`` of them
    are the prompt's, and the loss is on the others. ``cut`` characters of the item's text are not
    in it.
    """

    id: str
    ids: list[int]
    prompt_length: int
    cut: int = 0

    @property
    def answer_length(self) -> int:
        """Tokens that are learned: the answer's, and the end token."""
        return len(self.ids) - self.prompt_length


def encode_examples(
    builder: PromptBuilder, items: Sequence[Item], max_tokens: int, context_length: int | None
) -> list[Example]:
    """Items as training examples, in order. What is learned is never cut off.

    Parameters
    ----------
    builder
        The prompt builder, the same as in evaluation.
    items
        What to train on.
    max_tokens
        The longest example allowed, end token included.
    context_length
        The most tokens the model can read; ``None`` for no limit.

    Raises
    ------
    InputError
        If there is no item, if an example is longer than ``max_tokens`` or the model's context
        (the message names the items), or as :meth:`PromptBuilder.encode`.
    """
    if not items:
        raise InputError("there is no item to train on")
    end = builder.required_end_id()
    examples = []
    for item, prompt in zip(items, builder.encode(items, context_length), strict=True):
        answer = prompt.answers["positive" if item.label else "negative"]
        ids = [*prompt.ids, *answer, end]
        examples.append(Example(item.id, ids, len(prompt.ids), prompt.cut))
    too_long = [f"{e.id!r} ({len(e.ids)} tokens)" for e in examples if len(e.ids) > max_tokens]
    if too_long:
        more = f" and {len(too_long) - LISTED_IDS} more" if len(too_long) > LISTED_IDS else ""
        raise InputError(
            f"{len(too_long)} of {len(examples)} training examples are longer than max_tokens "
            f"({max_tokens}): {', '.join(too_long[:LISTED_IDS])}{more}; cutting them would lose "
            "their labels"
        )
    if len({item.label for item in items}) == 1:
        warn(f"all {len(items)} training items have the same label")
    return examples


def data_digest(examples: Sequence[Example]) -> str:
    """SHA-256 over ids, tokens and prompt lengths of all examples, in order."""
    return digest_of([[e.id, e.ids, e.prompt_length] for e in examples])


def batches_of_epoch(size: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch, as indices into ``size`` examples.

    The order is a random permutation that depends on ``seed`` and ``epoch`` alone, so that a
    resumed run needs nothing but the number of its step. The last batch may be smaller.
    """
    order = Stream("finetune", seed, "order", epoch).shuffled(range(size))
    return [order[start : start + batch_size] for start in range(0, size, batch_size)]


def random_seed(seed: int, purpose: str, step: int) -> int:
    """The seed, below 2^63, of what a step draws for a purpose."""
    return Stream("finetune", seed, purpose, step).below(2**63)
