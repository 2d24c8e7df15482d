"""`dflash-jax chat`: a conversation in the terminal; plain text, so that any terminal will do."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.cli.options import (
    check_request,
    conversation_plan,
    model_options,
    new_verb,
    open_pair,
    report_progress,
    use_compilation_cache,
)
from dflash_jax.cli.terminal import bracketed, columns, note
from dflash_jax.errors import RequestError
from dflash_jax.utils.command import counted_interrupts

HELP = "/stats: figures of the last answer; /reset: forget all; /exit: end"


def add_verb(verbs: Any) -> None:
    """Adds `chat` to the command line."""
    text = "Chat with the model; reads lines until they end."
    verb = new_verb(verbs, "chat", run, text, check=check_request)
    verb.add_argument("--system", help="system message")
    verb.add_argument("-n", "--max-tokens", type=int, default=512, help="per answer")
    verb.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    verb.add_argument("--top-p", type=float, default=1.0)
    verb.add_argument("--top-k", type=int, default=0)
    verb.add_argument("--seed", type=int)
    verb.add_argument("--no-thinking", action="store_true", help="ask for answers without thoughts")
    verb.add_argument("--plain", action="store_true", help="decode without drafting")
    model_options(verb)


def run(options: argparse.Namespace) -> int:
    """`dflash-jax chat`: a Ctrl-C ends the answer that is running, else the chat."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    conversation = Conversation(_load(options), options)
    with counted_interrupts() as interrupts:
        return _talk(conversation, interrupts)


def _talk(conversation: "Conversation", interrupts: Callable[[], int]) -> int:
    """Read lines and answer them until they end."""
    talking = sys.stdin.isatty()
    if talking:
        note(HELP)
    while True:
        try:
            line = _line(talking).strip()
        except EOFError:
            if talking:
                note("")  # the shell's prompt begins a line of its own
            return 0
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/help":
                note(HELP)
            case "/reset":
                conversation.reset()
                _notice("the conversation was reset")
            case "/stats":
                note(conversation.figures)
            case _ if line.startswith("/"):
                _notice(f"unknown command {line.split()[0]}", HELP)
            case _:
                interrupts()
                try:
                    conversation.say(line)
                except RequestError as error:
                    _notice(str(error))
                if interrupts() > 1:
                    raise KeyboardInterrupt


def _line(talking: bool) -> str:
    """Return the next line of input; the prompt never mixes with output sent to a file."""
    if talking and not sys.stdout.isatty():
        note("> ", end="")
        return input()
    return input("> " if talking else "")


def _notice(*parts: str) -> None:
    """Print a remark about the conversation, which is no part of its text."""
    note(bracketed(parts, columns(sys.stderr)))


def _load(options: argparse.Namespace) -> Any:
    with report_progress("loading", quiet=False):
        use_compilation_cache()
        pair = open_pair(options)
        engine = pair.engine(conversation_plan(options, pair))
    if engine.tokenizer is None or engine.tokenizer.template is None:
        raise RequestError("this model ships no chat template; use `dflash-jax generate --raw`")
    with report_progress("compiling", quiet=False):
        engine.warm_up(sampled=options.temperature > 0)
    return engine


class Conversation:
    """What was said, and an engine to go on."""

    def __init__(self, engine: Any, options: argparse.Namespace):
        from dflash_jax.tool_parsers import syntax_of

        self.engine, self._options = engine, options
        self._syntax = syntax_of(engine.tokenizer.teaches)
        self._last: Any = None
        self._stream: Any = None  # of the answer that is running
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        system = self._options.system
        self._talk = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Print the answer as it comes. Ctrl-C ends it and keeps what it said until then.

        Raises:
          RequestError: the message cannot be answered; it is forgotten.
          KeyboardInterrupt: a second Ctrl-C, while the first one is being acted upon.
        """
        self._talk.append({"role": "user", "content": text})
        said: list[str] = []
        stopped = False
        try:
            for part in self._answer():
                said.append(part)
        except KeyboardInterrupt:
            stopped = True
            if self._stream is not None:
                self._stream.close()
            note(" [stopped]", end="")
        except RequestError:
            self._talk.pop()
            raise
        print(flush=True)
        if self._stream is not None:
            self._last, self._stream = self._stream.result, None
        answer = "".join(said)
        if stopped and not answer:
            self._talk.pop()
        else:
            self._talk.append({"role": "assistant", "content": answer})

    def _answer(self) -> Iterator[str]:
        """Decode and print the answer to the conversation; yields what belongs to it."""
        from dflash_jax.engine.detokenizer import Detokenizer
        from dflash_jax.engine.vocabulary import opens_thought
        from dflash_jax.tool_parsers.stream import OutputParser

        options, tokenizer = self._options, self.engine.tokenizer
        prompt = self._prompt()
        marks = self._syntax.markers(calls=False) if self._syntax else ()
        output = Detokenizer(tokenizer.showing(marks) if marks else tokenizer)
        parser = OutputParser(self._syntax, thinking=opens_thought(tokenizer, prompt))
        room = self.engine.plan.max_length - len(prompt)
        self._stream = self.engine.stream(
            prompt,
            max_tokens=max(1, min(options.max_tokens, room)),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            speculative=not options.plain,
        )
        for piece in self._stream:
            for event in parser.push(output.push(piece.token_ids)):
                yield _print(event)
        for event in parser.push(output.finish()) + parser.finish():
            yield _print(event)

    def _prompt(self) -> list[int]:
        """Ids of the conversation; forgets its oldest exchanges when it gets too long."""
        variables = {"enable_thinking": False} if self._options.no_thinking else {}
        first = 1 if self._talk[0]["role"] == "system" else 0
        wanted = min(self._options.max_tokens, self.engine.plan.max_length // 4)
        while True:
            ids = self.engine.chat_ids(self._talk, **variables)
            if len(ids) + wanted <= self.engine.plan.max_length:
                return ids
            if len(self._talk) <= first + 2:
                raise RequestError(
                    f"this message has {len(ids)} tokens, and {self.engine.plan.max_length} are"
                    " the limit of the conversation; shorten it, or start with --max-length"
                )
            del self._talk[first : first + 2]
            _notice("the oldest exchange was forgotten: the conversation was too long")

    @property
    def figures(self) -> str:
        """Figures of the last answer."""
        if self._last is None:
            return "[no answer yet]"
        from dflash_jax.cli.generate import statistics

        return statistics(self._last, self.engine.compile_s)


def _print(event: Any) -> str:
    """Prints an event; returns what belongs to the answer. Thoughts are dimmed on a terminal."""
    from dflash_jax.tool_parsers.events import Content, Thinking

    if isinstance(event, Thinking):
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(f"\033[2m{event.text}\033[0m" if colours else event.text, end="", flush=True)
        return ""
    assert isinstance(event, Content)
    print(event.text, end="", flush=True)
    return event.text
