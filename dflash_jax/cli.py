"""The command `dflash-jax`: generate, explain, verify, probe, and the converters' verbs."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.allocator import tune_allocator
from dflash_jax.errors import DFlashError, RequestError
from dflash_jax.version import __version__

INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the process's exit code."""
    tune_allocator()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us quietly
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except DFlashError as error:
        print(f"dflash-jax: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndflash-jax: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="dflash-jax", description="DFlash speculative decoding in JAX, losslessly."
    )
    top.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    verbs = top.add_subparsers(required=True, metavar="VERB")
    _generate_verb(verbs)
    _explain_verb(verbs)
    _verify_verb(verbs)
    _probe_verb(verbs)
    from converters.cli import add_verbs

    add_verbs(verbs)
    return top


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(run=run)
    return verb


def _model_options(verb: argparse.ArgumentParser) -> None:
    models = verb.add_argument_group("models and plan")
    models.add_argument(
        "--target", default="tiny", help="directory, .gguf file, hub id, or 'tiny' (default)"
    )
    models.add_argument(
        "--drafter", default="auto", help="likewise; 'none' for no drafter (default: tiny's own)"
    )
    models.add_argument(
        "--taps",
        default="auto",
        help="how a drafter file numbers target layers: raw or plus1, where it leaves doubt",
    )
    models.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16")
    models.add_argument("--block", type=int, default=0, help="tokens per step, anchor included")
    models.add_argument("--max-length", type=int, default=0, help="prompt and output together")
    models.add_argument("--chunk", type=int, default=0, help="prompt tokens per prefill call")
    models.add_argument("--rows", type=int, default=1, help="requests side by side")
    models.add_argument("--inexact", action="store_true", help="let plain steps run one token wide")
    models.add_argument("--memory-limit", type=int, default=0, metavar="BYTES")


def _prompt_options(verb: argparse.ArgumentParser) -> None:
    prompt = verb.add_argument_group("prompt")
    prompt.add_argument("prompt", nargs="?", help="text; '-' reads standard input")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="raw token ids instead of text")
    prompt.add_argument("--system", help="system message, where the model has a chat template")
    prompt.add_argument(
        "--raw", action="store_true", help="feed the text as it is, without the chat template"
    )


def _generate_verb(verbs: Any) -> None:
    verb = _verb(verbs, "generate", generate, "Generate text, streamed, with statistics.")
    _prompt_options(verb)
    output = verb.add_argument_group("output")
    output.add_argument("-n", "--max-tokens", type=int, default=256)
    output.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    output.add_argument("--top-p", type=float, default=1.0)
    output.add_argument("--top-k", type=int, default=0)
    output.add_argument("--seed", type=int)
    output.add_argument("--stop", action="append", default=[], help="text that ends the output")
    output.add_argument("--ignore-eos", action="store_true")
    output.add_argument("--plain", action="store_true", help="decode without drafting")
    output.add_argument("--compare", action="store_true", help="time speculative against plain")
    output.add_argument("--json", action="store_true", help="print one JSON object at the end")
    output.add_argument("--quiet", action="store_true", help="no statistics line")
    _model_options(verb)


def _explain_verb(verbs: Any) -> None:
    verb = _verb(verbs, "explain", explain, "Show plan, memory, programs and rooflines.")
    verb.add_argument("--device", help="roofline for this device, e.g. H200 (default: this one)")
    verb.add_argument("--no-compile", action="store_true", help="arithmetic only")
    verb.add_argument("--params", action="store_true", help="list every parameter")
    verb.add_argument("--stablehlo", metavar="PROGRAM", help="print a program's StableHLO instead")
    verb.add_argument("--hlo", metavar="PROGRAM", help="print a program's optimised HLO instead")
    verb.add_argument("--json", action="store_true")
    _model_options(verb)


def _verify_verb(verbs: Any) -> None:
    verb = _verb(verbs, "verify", verify, "Check that speculative output equals plain output.")
    _prompt_options(verb)
    verb.add_argument("--prompts", type=Path, help="file with one prompt per line")
    verb.add_argument("-n", "--max-tokens", type=int, default=64)
    verb.add_argument("--json", action="store_true")
    _model_options(verb)


def _probe_verb(verbs: Any) -> None:
    verb = _verb(verbs, "probe", probe, "Write a prompt's logits and hidden states to a file.")
    _prompt_options(verb)
    verb.add_argument("--out", type=Path, help="file to write: .safetensors or .npz")
    verb.add_argument("--overwrite", action="store_true", help="replace an existing file")
    verb.add_argument("--top", type=int, default=5, help="likeliest next tokens to print")
    verb.add_argument("--target", default="tiny")
    verb.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    verb.add_argument("--json", action="store_true")


# -- verbs ------------------------------------------------------------------------------------


def generate(options: argparse.Namespace) -> int:
    """`dflash-jax generate`."""
    engine = _load(options, quiet=options.json)
    prompt = _prompt_ids(options, engine.tokenizer)
    request = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "seed": options.seed,
        "stop": options.stop,
        "ignore_eos": options.ignore_eos,
    }
    if options.compare:
        return _compare(engine, prompt, options)
    stream = engine.stream(prompt, speculative=not options.plain, **request)
    code = 0
    try:
        for piece in stream:
            if not options.json:
                print(piece.text or _as_ids(piece, engine), end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
        code = INTERRUPTED
    if options.json:
        print(json.dumps(stream.result.to_json()))
    else:
        print()
        if not options.quiet:
            print(_statistics(stream.result))
    return code


def explain(options: argparse.Namespace) -> int:
    """`dflash-jax explain`."""
    _use_compilation_cache()
    import jax

    from dflash_jax import loading
    from dflash_jax.compiler import compile_programs, declare
    from dflash_jax.compiler.explain import explain as report
    from dflash_jax.compiler.roofline import DEVICES, find_device

    target, drafter = loading.describe(options.target, _drafter(options))
    if options.device and options.device not in DEVICES:
        raise RequestError(f"device {options.device!r} is unknown; known: {', '.join(DEVICES)}")
    device = DEVICES.get(options.device or "") or find_device(jax.local_devices()[0].device_kind)
    if options.device:
        from dflash_jax.compiler import resolve

        platform = "cpu" if device.name == "CPU" else "gpu"
        plan = resolve(_plan(options), target, drafter, platform=platform, memory=device.memory)
    else:
        plan = loading.resolve_here(_plan(options), target, drafter)
    if name := options.stablehlo or options.hlo:
        programs = declare(plan, target, drafter)
        if name not in programs:
            raise RequestError(f"no program {name!r}; this plan has {', '.join(programs)}")
        built = compile_programs([programs[name]])[name]
        print(built.stablehlo if options.stablehlo else built.compiled.as_text())
        return 0
    found = report(target, drafter, plan, device, compile=not options.no_compile)
    print(json.dumps(found.to_json()) if options.json else found)
    if options.params and not options.json:
        for name, (shape, dtype) in found.parameters.items():
            print(f"{name:50} {dtype:10} {'x'.join(map(str, shape))}")
    return 0


def verify(options: argparse.Namespace) -> int:
    """`dflash-jax verify`: exit code 0 if every prompt's tokens are equal, 1 if not."""
    from dflash_jax.engine.compare import check

    engine = _load(options, quiet=options.json)
    if engine.drafter is None:
        raise RequestError("there is no drafter, so nothing to verify; give --drafter")
    checks = []
    for ids in _verify_prompts(options, engine):
        checks.append(done := check(engine, ids, max_tokens=options.max_tokens))
        if not options.json:
            state = "equal" if done.equal else f"DIFFER at token {done.first_difference}"
            tau = done.speculative.stats.acceptance_length
            print(
                f"prompt of {len(ids):4} tokens  {len(done.plain.token_ids):4} generated"
                f"  acceptance length {tau or 1:.2f}  {state}",
                flush=True,
            )
    failed = sum(not c.equal for c in checks)
    tokens = sum(len(c.plain.token_ids) for c in checks)
    if options.json:
        summary = {
            "prompts": len(checks),
            "tokens": tokens,
            "different": failed,
            "plan": dataclasses.asdict(engine.plan),
            "first_differences": [c.first_difference for c in checks],
        }
        print(json.dumps(summary))
    else:
        verdict = "speculative equals plain" if not failed else f"{failed} prompts DIFFER"
        print(f"{len(checks)} prompts, {tokens} tokens, {engine.plan.dtype}: {verdict}")
    return 1 if failed else 0


def probe(options: argparse.Namespace) -> int:
    """`dflash-jax probe`."""
    _use_compilation_cache()
    import numpy as np

    from dflash_jax import loading

    if options.out and options.out.exists() and not options.overwrite:
        raise RequestError(f"{options.out} exists; choose another name or add --overwrite")
    if options.out and options.out.suffix not in (".npz", ".safetensors"):
        raise RequestError(f"{options.out} must end in .safetensors or .npz")
    model = loading.load_target(options.target, dtype=options.dtype)
    tokenizer = model.tokenizer
    ids = _prompt_ids(options, tokenizer)
    output = model.forward([ids])
    logits = np.asarray(output.logits)[0]
    hidden = np.asarray(output.hidden.astype("float32"))[:, 0]
    if options.out:
        arrays = {"token_ids": np.asarray(ids, np.int32), "logits": logits, "hidden": hidden}
        _write_arrays(options.out, arrays)
    best = np.argsort(-logits[-1], kind="stable")[: max(options.top, 0)]
    shares = np.exp(logits[-1] - logits[-1].max())
    shares /= shares.sum()
    if options.json:
        top = [{"id": int(i), "probability": float(shares[i])} for i in best]
        out = str(options.out) if options.out else None
        print(json.dumps({"tokens": len(ids), "top": top, "out": out}))
        return 0
    print(f"{len(ids)} tokens, logits {logits.shape}, hidden states {hidden.shape}")
    for i in best:
        text = repr(tokenizer.core.id_to_token(int(i))) if tokenizer else ""
        print(f"{i:8}  {shares[i]:7.2%}  {text}")
    if options.out:
        print(f"written to {options.out}")
    return 0


# -- parts ------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> Any:
    from dflash_jax.compiler import Plan

    return Plan(
        rows=options.rows,
        max_length=options.max_length,
        block=options.block,
        chunk=options.chunk,
        dtype=options.dtype,
        exact=not options.inexact,
        memory_limit=options.memory_limit,
    )


def _drafter(options: argparse.Namespace) -> str | None:
    return None if options.drafter == "none" else options.drafter


def _load(options: argparse.Namespace, *, quiet: bool) -> Any:
    """A warm engine; says on standard error what takes time."""
    with _telling("loading", quiet=quiet):
        _use_compilation_cache()
        from dflash_jax import loading

        engine = loading.load(
            options.target, _drafter(options), plan=_plan(options), taps=options.taps
        )
    with _telling("compiling", quiet=quiet):
        engine.warm_up()
    return engine


@contextlib.contextmanager
def _telling(what: str, *, quiet: bool) -> Iterator[None]:
    show = not quiet and sys.stderr.isatty()
    if show:
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        yield
    finally:
        if show:
            print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)


def _use_compilation_cache() -> None:
    """Keeps compiled programs under the user's cache folder, where there is one to write to."""
    from dflash_jax.compiler import enable_compilation_cache

    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    with contextlib.suppress(OSError):
        enable_compilation_cache(Path(root) / "dflash_jax" / "xla")


def _prompt_ids(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    if options.prompt_ids is not None:
        if options.prompt is not None:
            raise RequestError("both a prompt and --prompt-ids were given; give one of them")
        try:
            return [int(i) for i in options.prompt_ids.split(",") if i.strip()]
        except ValueError as error:
            raise RequestError(
                f"--prompt-ids is {options.prompt_ids!r}; expected integers like 1,2,3"
            ) from error
    if options.prompt is None:
        raise RequestError('no prompt; give a text, --prompt-ids 1,2,3, or "-" for standard input')
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text.strip():
        raise RequestError("the prompt is empty; give at least one character")
    return _encode(text, options, tokenizer)


def _encode(text: str, options: argparse.Namespace, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise RequestError("this model ships no tokenizer; give --prompt-ids instead of text")
    if options.raw or tokenizer.template is None:
        return tokenizer.encode(text)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return tokenizer.chat([*system, {"role": "user", "content": text}])


def _verify_prompts(options: argparse.Namespace, engine: Any) -> list[list[int]]:
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{options.prompts} cannot be read: {error}") from error
        if not any(line.strip() for line in lines):
            raise RequestError(f"{options.prompts} holds no prompt; write one per line")
        return [_encode(line, options, engine.tokenizer) for line in lines if line.strip()]
    if options.prompt is None and options.prompt_ids is None:
        if engine.tokenizer is None:
            raise RequestError("this model ships no tokenizer; give --prompt-ids 1,2,3")
        texts = (
            "Hello!",
            "What is 17 + 25?",
            "List three colours.",
            "Write a function that adds two numbers.",
            "Give me a JSON object with a name and an age.",
        )
        return [_encode(text, options, engine.tokenizer) for text in texts]
    return [_prompt_ids(options, engine.tokenizer)]


def _compare(engine: Any, prompt: list[int], options: argparse.Namespace) -> int:
    from dflash_jax.engine.compare import compare

    if engine.drafter is None:
        raise RequestError("--compare needs a drafter; give --drafter")
    if options.temperature > 0:
        raise RequestError("--compare is for greedy decoding; leave --temperature at 0")
    found = compare(
        engine,
        prompt,
        max_tokens=options.max_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    result = found.check.speculative
    if options.json:
        lanes = {n: getattr(found, n) for n in ("speculative", "plain", "plain1")}
        print(
            json.dumps(
                result.to_json()
                | {
                    "equal": found.check.equal,
                    "tokens_per_s": lanes,
                    "baseline": found.baseline,
                    "speedup": found.speedup,
                }
            )
        )
        return 0 if found.check.equal else 1
    print(result.text if result.text is not None else " ".join(map(str, result.token_ids)))
    for name, label in (
        ("speculative", "speculative"),
        ("plain", "plain, block-wide"),
        ("plain1", "plain, one token"),
    ):
        speeds = sorted(getattr(found, name))
        print(f"{label:18} {speeds[len(speeds) // 2]:9.1f} tok/s")
    print(_statistics(result))
    verdict = "equal" if found.check.equal else f"DIFFER at {found.check.first_difference}"
    print(
        f"tokens {verdict}; speculative is {found.speedup:.2f}x the faster plain lane"
        f" ({found.baseline}), {engine.plan.dtype}"
    )
    return 0 if found.check.equal else 1


def _as_ids(piece: Any, engine: Any) -> str:
    """Ids in place of text where there is no tokenizer."""
    return "" if engine.tokenizer else "".join(f"{i} " for i in piece.token_ids)


def _statistics(result: Any) -> str:
    s = result.stats
    parts = [
        f"{s.output_tokens} tokens ({result.finish_reason})",
        f"{s.tokens_per_s:.1f} tok/s",
        f"first token {s.first_token_s * 1e3:.0f} ms",
    ]
    if s.rounds:
        shares = " ".join(f"{n / s.rounds:.2f}" for n in s.accepted_per_position)
        parts += [f"acceptance length {s.acceptance_length:.2f}", f"per position {shares}"]
    elif s.plain_steps:
        parts.append("plain decoding")
    parts.append(f"compile {s.compile_s:.1f} s")
    return "[" + " | ".join(parts) + "]"


def _write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes beside the file and renames, so that no half-written file is left."""
    import numpy as np
    from safetensors.numpy import save_file

    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".npz":
            with partial.open("wb") as file:
                np.savez(file, **arrays)
        else:
            save_file(arrays, partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RequestError(f"{path} could not be written: {error}") from error
