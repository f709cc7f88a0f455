"""Prompts as tokens: the one place from which training and evaluation get theirs."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pharos.errors import InputError
from pharos.runtime.log import warn

ANSWERS = ("positive", "negative")
# Some chat templates print today's date; a prompt must not change from one day to the next.
FIXED_DATE = (
    "{% macro strftime_now(format) %}"
    "{{ '2024-07-26' if '%Y-' in format else '26 Jul 2024' }}"
    "{% endmacro %}"
)
LISTED_IDS = 5
SOME_ANSWER = "the answer"


class Asked(Protocol):
    """What a prompt needs of an item."""

    @property
    def id(self) -> str:
        """The unique name."""

    @property
    def text(self) -> str:
        """What the model reads."""


@dataclass(frozen=True)
class Prompt:
    """One item as tokens.

    ``ids`` are the prompt's tokens; ``answers`` maps ``"positive"`` and ``"negative"`` to the
    tokens of that answer after this prompt, without the end token; ``sha256`` is over the
    prompt's text; ``cut`` is how many characters of the item's text were left out of it.
    """

    id: str
    ids: list[int]
    answers: dict[str, list[int]]
    sha256: str
    cut: int = 0


class PromptBuilder:
    """Builds prompts of one task for one tokenizer.

    With a chat template the prompt is the system and user turn and the opening of the
    assistant's; the template runs in transformers' sandbox, and a template that knows no
    system role gets the system text at the head of the user's turn. Without one the prompt is
    ``system``, a blank line, the user's text, and ``Answer:``. Every prompt begins with what
    the tokenizer itself puts before a text (a BOS, for most), exactly once.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    prompt_config
        ``tasks.<task>.prompt`` of the configuration: ``system``, ``template``, ``answers``,
        ``too_long``.

    Attributes
    ----------
    answers
        The two answers as written, by ``"positive"`` and ``"negative"``.
    end_id
        The token that ends an answer: the chat template's end of turn, else the tokenizer's
        end of text; ``None`` where the tokenizer has neither.
    chat
        Whether a chat template is used.

    Raises
    ------
    InputError
        If an answer is blank, or the chat template cannot render the task's prompt.
    """

    def __init__(self, tokenizer: Any, prompt_config: Mapping[str, Any]) -> None:
        """Find out how this tokenizer wants to be asked."""
        self._tokenizer = tokenizer
        self._system = prompt_config.get("system", "").strip()
        self._template = prompt_config["template"]
        self._too_long = prompt_config.get("too_long", "refuse")
        self.answers = {name: prompt_config["answers"][name].strip() for name in ANSWERS}
        for name, answer in self.answers.items():
            if not answer:
                raise InputError(f"prompt.answers.{name} is blank")
        added = tokenizer.added_tokens_decoder
        self._control = {token_id: str(token) for token_id, token in added.items() if token.special}
        self._opening = _tokens_put_before_a_text(tokenizer)
        self._chat_template = _chat_template_of(tokenizer)
        self.chat = self._chat_template is not None
        self._system_in_user_turn = False
        self._lead, self.end_id = " ", tokenizer.eos_token_id
        if self.chat:
            self._study_chat_template()

    # -- text ---------------------------------------------------------------------------------

    def prompt_text(self, text: str) -> str:
        """The whole prompt for one item's ``text``, before it becomes tokens."""
        user = self._template.replace("{text}", text)
        if self.chat:
            return self._render(self._messages(user), opens_answer=True)
        return "\n\n".join(part for part in (self._system, user) if part) + "\nAnswer:"

    def _messages(self, user: str) -> list[dict[str, str]]:
        if not self._system:
            return [{"role": "user", "content": user}]
        if self._system_in_user_turn:
            return [{"role": "user", "content": f"{self._system}\n\n{user}"}]
        return [{"role": "system", "content": self._system}, {"role": "user", "content": user}]

    def _render(self, messages: list[dict[str, str]], opens_answer: bool) -> str:
        import jinja2

        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._chat_template,
                add_generation_prompt=opens_answer,
                tokenize=False,
                enable_thinking=False,
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template refuses the prompt: {error}") from None
        return str(rendered)

    def _study_chat_template(self) -> None:
        """Learn where the system text goes, what precedes an answer, and what ends it."""
        user = self._template.replace("{text}", "text")
        if self._system:
            try:
                rendered = self._render(self._messages(user), opens_answer=True)
            except InputError:
                rendered = ""
            self._system_in_user_turn = self._system not in rendered
        prompt = self._render(self._messages(user), opens_answer=True)
        if self._system not in prompt or "text" not in prompt:
            raise InputError("the model's chat template leaves out the system or the user's text")
        # Not an answer of the task: a short one may be found in the end token's own name.
        turn = {"role": "assistant", "content": SOME_ANSWER}
        closed = self._render([*self._messages(user), turn], opens_answer=False)
        before, _, after = closed.rpartition(SOME_ANSWER)
        gap = before.removeprefix(prompt)
        self._lead = gap if before.startswith(prompt) and not gap.strip() else ""
        end = next((token for token in self._encode(after) if token in self._control), None)
        self.end_id = self._tokenizer.eos_token_id if end is None else end

    # -- tokens -------------------------------------------------------------------------------

    def required_end_id(self) -> int:
        """:attr:`end_id`, or an error where the tokenizer has none."""
        if self.end_id is None:
            raise InputError("the tokenizer has no end-of-turn and no end-of-text token")
        return int(self.end_id)

    def encode(
        self, items: Iterable[Asked], context_length: int | None = None, room: int | None = None
    ) -> list[Prompt]:
        """All items as tokens, in order.

        Parameters
        ----------
        items
            Anything with ``id`` and ``text``.
        context_length
            The most tokens the model can read; ``None`` for no limit.
        room
            Tokens that must fit after the prompt; by default the longest answer and its end.

        Raises
        ------
        InputError
            If a text holds one of the tokenizer's control tokens, if the prompt's tokens are
            not the first tokens of prompt + answer, if an answer adds no token, or if a prompt
            is too long and ``too_long`` is ``refuse``; the message names the items.
        """
        items = list(items)
        self._refuse_control_tokens(items)
        encoded = self._prompts([item.id for item in items], [item.text for item in items])
        if context_length is None:
            return encoded
        too_long = [
            place for place, prompt in enumerate(encoded) if _size(prompt, room) > context_length
        ]
        if too_long and self._too_long == "refuse":
            raise InputError(_too_long_message(encoded, too_long, context_length, room))
        for place in too_long:
            encoded[place] = self._cut(items[place], context_length, room)
        if too_long:
            warn(
                f"{len(too_long)} of {len(items)} texts are cut at their "
                f"{self._too_long.removeprefix('cut_')} to fit the model's context of "
                f"{context_length} tokens"
            )
        return encoded

    def _prompts(self, ids: Sequence[str], texts: Sequence[str]) -> list[Prompt]:
        asked = [self.prompt_text(text) for text in texts]
        prompts = self._encode_all(asked)
        wholes = {
            name: self._encode_all([text + self._lead + answer for text in asked])
            for name, answer in self.answers.items()
        }
        return [
            Prompt(
                ids[row],
                prompts[row],
                {n: self._tail(prompts[row], wholes[n][row], n, ids[row]) for n in ANSWERS},
                hashlib.sha256(asked[row].encode()).hexdigest(),
            )
            for row in range(len(asked))
        ]

    def _cut(self, item: Asked, context_length: int, room: int | None) -> Prompt:
        """The prompt with as much of the text as fits: its beginning, or its end."""

        def keeping(size: int) -> Prompt:
            start = len(item.text) - size if self._too_long == "cut_start" else 0
            return self._prompts([item.id], [item.text[start : start + size]])[0]

        best, fits, too_much = None, 1, len(item.text)
        while fits < too_much:
            size = (fits + too_much) // 2
            prompt = keeping(size)
            if _size(prompt, room) <= context_length:
                best, fits = prompt, size + 1
            else:
                too_much = size
        if best is None:
            raise InputError(
                f"item {item.id!r}: the prompt without its text has {_size(keeping(0), room)} "
                f"tokens with its answer, and the model's context has {context_length}"
            )
        return dataclasses.replace(best, cut=len(item.text) - (fits - 1))

    def _tail(self, prompt: list[int], whole: list[int], answer: str, where: str) -> list[int]:
        if whole[: len(prompt)] != prompt:
            raise InputError(
                f"{where!r}: the prompt's tokens are not the first tokens of prompt + "
                f"{self.answers[answer]!r}: this tokenizer joins the two; end prompt.template "
                "with a character that stands alone"
            )
        if len(whole) == len(prompt):
            raise InputError(f"{where!r}: {self.answers[answer]!r} adds no token to the prompt")
        return whole[len(prompt) :]

    def _refuse_control_tokens(self, items: Sequence[Asked]) -> None:
        for item in items:
            for token in self._control.values():
                if token in item.text:
                    raise InputError(
                        f"item {item.id!r}: the text holds {token!r}, which this model reads as "
                        "a control token; take it out of the corpus"
                    )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        rows = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self._with_opening(list(row)) for row in rows]

    def _with_opening(self, ids: list[int]) -> list[int]:
        """``ids`` with the tokenizer's own opening (a BOS) in front, once."""
        size = len(self._opening)
        while size and ids[:size] == self._opening:
            ids = ids[size:]
        return self._opening + ids


def shared_prefix_length(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts have in common at the front, at least one left to each.

    ``prompts`` are lists of tokens; with none, the answer is 0.
    """
    if not prompts:
        return 0
    # Whatever the least and the greatest share, all those between them share too.
    first, last = min(prompts), max(prompts)
    limit = min(map(len, prompts)) - 1
    length = 0
    while length < limit and first[length] == last[length]:
        length += 1
    return length


def refuse_unknown_tokens(model: Any, tokens: Mapping[str, Sequence[int]]) -> None:
    """Refuse tokens for which the model has no row: a tokenizer may know more than it does.

    ``tokens`` are those that the model is to read or to answer with, by the item's id.

    Raises
    ------
    InputError
        With the first item that has one.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    for item, used in tokens.items():
        if max(used) >= rows:
            raise InputError(
                f"item {item!r}: token {max(used)} is beyond the model's {rows} embeddings: "
                "tokenizer and model do not belong together"
            )


def _tokens_put_before_a_text(tokenizer: Any) -> list[int]:
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    dressed = list(tokenizer("a")["input_ids"])
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start]
    return []


def _chat_template_of(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    try:
        template = str(tokenizer.get_chat_template())
    except ValueError as error:
        raise InputError(f"the model's chat template cannot be used: {error}") from None
    return FIXED_DATE + template if "strftime_now" in template else template


def cut_record(cut: Mapping[str, int]) -> dict[str, Any]:
    """For the record: ``count`` and ``ids`` of the items (``{id: characters}``) that were cut."""
    ids = [item for item, characters in cut.items() if characters]
    return {"count": len(ids), "ids": ids}


def _room_after(prompt: Prompt, room: int | None) -> int:
    return 1 + max(map(len, prompt.answers.values())) if room is None else room


def _size(prompt: Prompt, room: int | None) -> int:
    return len(prompt.ids) + _room_after(prompt, room)


def _too_long_message(
    prompts: Sequence[Prompt], too_long: Sequence[int], context_length: int, room: int | None
) -> str:
    listed = ", ".join(
        f"{prompts[place].id!r} ({len(prompts[place].ids)} + {_room_after(prompts[place], room)} "
        "tokens)"
        for place in too_long[:LISTED_IDS]
    )
    more = len(too_long) - LISTED_IDS
    return (
        f"{len(too_long)} of {len(prompts)} prompts do not fit the model's context of "
        f"{context_length} tokens: {listed}{f' and {more} more' if more > 0 else ''}; "
        "prompt.too_long: cut_end (or cut_start) would leave out that part of the text"
    )
