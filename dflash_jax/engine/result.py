"""What a caller gets back: pieces while a request runs, a result and its statistics after."""

import collections
import dataclasses
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target found a token, before penalties, biases, temperature and filters."""

    token_id: int
    logprob: float | None  # None for one that was dictated, not chosen, and a prompt's first
    top: tuple[tuple[int, float], ...]  # the likeliest tokens at its place, best first


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """New output of a stream. Nothing given is ever taken back."""

    token_ids: tuple[int, ...]
    text: str  # empty where the engine has no tokenizer, or a character is unfinished
    logprobs: tuple[TokenLogprob, ...] = ()  # of every token, where the request asks for them


@dataclasses.dataclass(kw_only=True)
class Stats:
    """How a request went. Times in seconds.

    Attributes:
      rounds: speculative steps that decided at least one token.
      plain_steps: steps without drafting that decided a token.
      drafted: drafts that were verified; those a low chance to survive cut off are not.
      acceptance_lengths: tokens decided per round, bonus included.
      drafts_per_round: drafts verified in each round.
      accepted_per_position: rounds in which the draft at each place was accepted.
      prefill_s: from the start of the prompt to the first token.
      decode_s: from the first token to the last.
      compile_s: spent compiling programs for this request; 0 once the engine is warm.
      fallbacks: reasons why rounds were not drafted, with counts; among them "empty_retry", an
        answer in which nothing was visible and that was decoded once more without drafts, and how
        that ended: "empty_retry_recovered" or "empty_retry_confirmed_eos".
      recovery: recovery events, with counts: what happened to the answer that was given. They are
        the same with and without drafts, and for every block size.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache and not fed
    output_tokens: int = 0
    rounds: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    drafts_per_round: list[int] = dataclasses.field(default_factory=list)
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    first_token_s: float = 0.0  # from submission, queueing and compiling included
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    fallbacks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recovery: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per round, bonus included (tau); None without a round."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first over `decode_s`."""
        return (self.output_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def count_round(self, decided: int, drafted: int, places: int) -> None:
        """Books one speculative round that decided tokens, of which all but one were drafts.

        Args:
          drafted: drafts that were verified.
          places: drafts of a whole block.
        """
        if not decided:
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += decided - 1
        self.acceptance_lengths.append(decided)
        self.drafts_per_round.append(drafted)
        self.accepted_per_position = self.accepted_per_position or [0] * places
        for place in range(decided - 1):
            self.accepted_per_position[place] += 1

    def to_json(self) -> dict[str, Any]:
        """All figures as JSON values."""
        derived = {
            "acceptance_length": self.acceptance_length,
            "tokens_per_s": self.tokens_per_s,
            "fallbacks": dict(self.fallbacks),  # asdict counts a Counter's items anew
            "recovery": dict(self.recovery),
        }
        return dataclasses.asdict(self) | derived


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `finish_reason` is "stop", "length" or "cancelled"."""

    token_ids: list[int]
    text: str | None  # None where the engine has no tokenizer
    finish_reason: str
    stats: Stats
    logprobs: list[TokenLogprob] | None = None  # None where the request did not ask
    prompt_logprobs: list[TokenLogprob] | None = None  # likewise; of every token of the prompt

    def __repr__(self) -> str:
        said = "" if self.text is None else f": {_SHORT.repr(self.text)}"
        tau = self.stats.acceptance_length
        drafted = "" if tau is None else f", acceptance length {tau:.2f}"
        count = len(self.token_ids)
        tokens = f"{count} token{'s' * (count != 1)}"
        return f"<Result: {tokens} ({self.finish_reason}){drafted}{said}>"

    def to_json(self) -> dict[str, Any]:
        """The object `dflash-jax generate --json` prints."""
        fields: dict[str, Any] = {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_json(),
        }
        asked = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        for name, tokens in asked.items():
            if tokens is not None:
                fields[name] = [dataclasses.asdict(token) for token in tokens]
        return fields
