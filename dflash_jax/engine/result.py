"""Results of requests: pieces while they run, a result and its statistics afterwards."""

import collections
import dataclasses
import reprlib
from typing import Any

from dflash_jax.engine.state_machine.trace import RoundTrace
from dflash_jax.show import Shown, result_html, result_shown, stats_html

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, before penalties, biases, temperature and filters."""

    token_id: int
    logprob: float | None  # None for a forced token, and for the first of a prompt
    # Ids and log-probabilities of the most likely tokens at its position, best first.
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """New output of a request. Nothing in it is ever taken back."""

    token_ids: tuple[int, ...]
    text: str  # empty without a tokenizer, or while a character is incomplete
    logprobs: tuple[TokenLogprob, ...] = ()  # of every token, if the request asks for them
    # Rounds that are complete with this piece, if the request asks for them. A round ends after
    # tokens of earlier pieces if others of its tokens were held.
    trace: tuple[RoundTrace, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Stats:
    """Statistics of a request.

    Attributes:
      prompt_tokens: number of tokens of the prompt.
      cached_tokens: number of tokens of the prompt that were restored from the prefix cache.
      output_tokens: number of tokens of the output.
      rounds: number of draft-verify rounds that committed at least one token.
      plain_steps: number of steps without drafting that committed a token.
      drafted: number of drafts that were verified; `Plan.confidence_threshold` leaves some out.
      accepted: number of drafts that the target accepted.
      copied: number of drafts that the n-gram drafter copied from earlier text, see `Plan.ngram`.
      acceptance_lengths: number of tokens that each round committed, bonus token included.
      drafts_per_round: number of drafts that were verified in each round.
      accepted_per_position: number of rounds that accepted the draft at each position.
      first_token_s: seconds from submission to the first token, queueing and compiling included.
      prefill_s: seconds from the start of the prompt to the first token.
      decode_s: seconds from the first token to the last.
      compile_s: seconds spent compiling programs for this request; 0 once the engine is warm.
      fallbacks: reasons for rounds without drafts, with counts; among them "empty_retry", an answer
        without visible output that was decoded again without drafts, and the outcome of that:
        "empty_retry_recovered" or "empty_retry_confirmed_eos".
      recovery: recovery events of the answer, with counts. They are the same with and without
        drafts, and for every block size.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    drafts_per_round: list[int] = dataclasses.field(default_factory=list)
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    first_token_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    fallbacks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recovery: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per round, bonus token included (τ); None without a round."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first over `decode_s`."""
        return (self.output_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def _repr_html_(self) -> str:
        return stats_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        derived = {
            "acceptance_length": self.acceptance_length,
            "tokens_per_s": self.tokens_per_s,
            "fallbacks": dict(self.fallbacks),  # asdict would count a Counter's items
            "recovery": dict(self.recovery),
        }
        return dataclasses.asdict(self) | derived


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `finish_reason` is "stop", "length" or "cancelled"."""

    token_ids: list[int]
    text: str | None  # None without a tokenizer
    finish_reason: str
    stats: Stats
    logprobs: list[TokenLogprob] | None = None  # None if not requested
    # Of every token of the prompt; None if not requested.
    prompt_logprobs: list[TokenLogprob] | None = None
    trace: tuple[RoundTrace, ...] = ()  # empty if not requested

    def __repr__(self) -> str:
        text = "" if self.text is None else f": {_SHORT.repr(self.text)}"
        tau = self.stats.acceptance_length
        drafted = "" if tau is None else f", acceptance length {tau:.2f}"
        count = len(self.token_ids)
        tokens = "1 token" if count == 1 else f"{count} tokens"
        return f"<Result: {tokens} ({self.finish_reason}){drafted}{text}>"

    def show(self, *, by_round: bool = False) -> Shown:
        """Return the trace to display in a notebook: accepted, own, forced and rejected tokens.

        Without a trace (`SamplingParams.trace`), return a table of text and statistics.

        Args:
          by_round: whether every round begins a line.
        """
        return result_shown(self, by_round=by_round)

    def _repr_html_(self) -> str:
        return result_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `dflash-jax generate --json` prints."""
        fields: dict[str, Any] = {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_json(),
        }
        if self.logprobs is not None:
            fields["logprobs"] = [dataclasses.asdict(token) for token in self.logprobs]
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                dataclasses.asdict(token) for token in self.prompt_logprobs
            ]
        if self.trace:
            fields["trace"] = [_round_to_json(traced) for traced in self.trace]
        return fields


def _round_to_json(traced: RoundTrace) -> dict[str, Any]:
    """Return the fields of a round as JSON values, without those that are not reported."""
    fields: dict[str, Any] = dataclasses.asdict(traced)
    for name in ("draft_top", "target_top"):
        top = fields.pop(name)
        if top is not None:
            fields[name] = {key: array.tolist() for key, array in top._asdict().items()}
    return fields
