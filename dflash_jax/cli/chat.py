"""`dflash-jax chat`: a conversation in the terminal, in plain text."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.cli.terminal import bracketed, columns, has_colours, note
from dflash_jax.errors import RequestError
from dflash_jax.show import legend, marked
from dflash_jax.utils.command import counted_interrupts

HELP = "/stats: figures of the last answer; /reset: forget all; /exit: end"


def add_command(commands: Any) -> None:
    """Add `chat` to the command line."""
    text = "Chat with the model; reads lines until the end of input."
    command = shared.new_command(commands, "chat", run, text, check=check)
    command.add_argument("--system", help="system message")
    shared.sampling_options(command, max_tokens=512)
    command.add_argument(
        "--no-thinking", action="store_true", help="ask for answers without reasoning"
    )
    shared.add_show_drafts(command)
    shared.model_options(command)


def check(options: argparse.Namespace) -> None:
    """Check the options before JAX is imported or a model is opened."""
    options.report_drafts |= options.show_drafts
    shared.check_request(options)


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax chat`. Ctrl-C ends the current answer, or the chat at the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    session = ChatSession(_load(options), options)
    with counted_interrupts() as interrupts:
        return _chat_loop(session, interrupts)


def _chat_loop(session: "ChatSession", interrupts: Callable[[], int]) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        note(HELP)
    while True:
        try:
            line = _line(interactive).strip()
        except EOFError:
            if interactive:
                note("")  # the shell's prompt starts on a new line
            return 0
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/help":
                note(HELP)
            case "/reset":
                session.reset()
                _notice("the conversation was reset")
            case "/stats":
                note(session.figures)
            case _ if line.startswith("/"):
                _notice(f"unknown command {line.split()[0]}", HELP)
            case _:
                interrupts()
                try:
                    session.send(line)
                except RequestError as error:
                    _notice(str(error))
                if interrupts() > 1:
                    raise KeyboardInterrupt


def _line(interactive: bool) -> str:
    """Return the next line of input. The prompt is not written to redirected standard output."""
    if interactive and not sys.stdout.isatty():
        note("> ", end="")
        return input()
    return input("> " if interactive else "")


def _notice(*parts: str) -> None:
    note(bracketed(parts, columns(sys.stderr)))


def _load(options: argparse.Namespace) -> Any:
    from dflash_jax.server.configuration import LONGEST

    with shared.report_progress("loading", quiet=False):
        shared.use_compilation_cache()
        pair = shared.open_pair(options)
        plan = shared.chosen_plan(options)
        if not plan.max_length:
            longest = min(LONGEST, pair.configs[0].max_length)
            plan = dataclasses.replace(plan, max_length=longest)
        engine = pair.engine(plan)
    if engine.tokenizer is None or engine.tokenizer.template is None:
        raise RequestError("this model ships no chat template; use `dflash-jax generate --raw`")
    with shared.report_progress("compiling", quiet=False):
        engine.warm_up(shared.wanted_variant(options))
        engine.time_drafting()
    return engine


class ChatSession:
    """A conversation with an engine."""

    def __init__(self, engine: Any, options: argparse.Namespace):
        from dflash_jax.tool_parsers import syntax_of

        self.engine = engine
        self._options = options
        self._syntax = syntax_of(engine.tokenizer.teaches)
        self._last: Any = None
        self._stream: Any = None  # handle of the current answer
        self.reset()

    def reset(self) -> None:
        """Remove all messages but the system message."""
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def send(self, text: str) -> None:
        """Send a message and stream the answer to standard output.

        Ctrl-C ends the answer; the text so far stays in the conversation.

        Raises:
          RequestError: the message cannot be answered; it is removed.
          KeyboardInterrupt: a second Ctrl-C while the first one is being handled.
        """
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        stopped = False
        try:
            for part in self._answer():
                parts.append(part)
        except KeyboardInterrupt:
            stopped = True
            if self._stream is not None:
                self._stream.close()
            note(" [stopped]", end="")
        except RequestError:
            self._messages.pop()
            raise
        print(flush=True)
        if self._stream is not None:
            self._last = self._stream.result()
            self._stream = None
            if self._options.show_drafts:
                print(legend(self._last.stats, colours=has_colours()), flush=True)
        answer = "".join(parts)
        if stopped and not answer:
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> Iterator[str]:
        """Generate and print the answer; yield its text without reasoning.

        With --show-drafts, the tokens are printed as the model decided them, tags included.
        """
        from dflash_jax.engine.vocabulary import opens_thought
        from dflash_jax.tool_parsers.stream import OutputParser

        options = self._options
        tokenizer = self.engine.tokenizer
        prompt = self._prompt()
        markers = self._syntax.markers(calls=False) if self._syntax else ()
        showing = tokenizer.showing(markers)
        # The engine's text leaves out special tokens, among them the markers of reasoning.
        output = showing.stream() if showing.shown else None
        parser = OutputParser(self._syntax, thinking=opens_thought(tokenizer, prompt))
        room = self.engine.plan.max_length - len(prompt)
        params = shared.sampling_params(options).with_options(
            max_tokens=max(1, min(options.max_tokens, room)), trace=options.show_drafts
        )
        self._stream = self.engine.submit(prompt, params)
        shown = not options.show_drafts
        for piece in self._stream:
            for traced in piece.trace:
                print(marked(traced, colours=has_colours()), end="", flush=True)
            for event in parser.push(output.push(piece.token_ids) if output else piece.text):
                yield _print(event, shown=shown)
        for event in parser.push(output.flush() if output else "") + parser.finish():
            yield _print(event, shown=shown)

    def _prompt(self) -> list[int]:
        """Return the ids of the conversation; removes its oldest exchanges if it is too long."""
        variables = {"enable_thinking": False} if self._options.no_thinking else {}
        first = 1 if self._messages[0]["role"] == "system" else 0
        wanted = min(self._options.max_tokens, self.engine.plan.max_length // 4)
        while True:
            ids = self.engine.chat_ids(self._messages, **variables)
            if len(ids) + wanted <= self.engine.plan.max_length:
                return ids
            if len(self._messages) <= first + 2:
                raise RequestError(
                    f"this message has {len(ids)} tokens, and {self.engine.plan.max_length} are"
                    " the limit of the conversation; shorten it, or start with --max-length"
                )
            del self._messages[first : first + 2]
            _notice("the oldest exchange was forgotten: the conversation was too long")

    @property
    def figures(self) -> str:
        """Return the statistics of the last answer as text."""
        if self._last is None:
            return "[no answer yet]"
        from dflash_jax.cli.generate import statistics

        return statistics(self._last, self.engine.core.runner.compiled.seconds)


def _print(event: Any, *, shown: bool = True) -> str:
    """Print an event, and return its text if it is content. Reasoning is dimmed on a terminal.

    Args:
      shown: False prints nothing.
    """
    from dflash_jax.tool_parsers.calls import Content, Thinking

    assert isinstance(event, Content | Thinking)
    thought = isinstance(event, Thinking)
    if shown:
        dimmed = thought and has_colours()
        print(f"\033[2m{event.text}\033[0m" if dimmed else event.text, end="", flush=True)
    return "" if thought else event.text
