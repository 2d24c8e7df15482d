"""The prebuilt llama.cpp as a worker, run with a Python that has `pip install xllamacpp`.

    python xllamacpp_worker.py MODEL.gguf CORES CONTEXT [float32]

Requests and replies are those of llama_worker.cpp, plain decoding and logits. The library's server
is asked over HTTP, as its users do; logits, which it does not serve, come from its C interface,
with keys and values in float16, its default, or in float32. "encode FILE TYPE,ROWS,COLUMNS" turns a
file of float32 into blocks.
"""

import ctypes
import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[list[int], str], dict[str, Any]]


class Parameters(ctypes.Structure):
    """Parameters of models and contexts, which are smaller and passed by value."""

    _fields_ = (("words", ctypes.c_uint32 * 256),)


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("embeddings", ctypes.c_void_p),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("numbers_of_rows", ctypes.POINTER(ctypes.c_int32)),
        ("rows", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    )


# Places of context parameters in words, with their defaults, by which the layout is checked.
LENGTH, BATCH, THREADS, FLASH, TYPES = 0, 1, 7, 13, 26
DEFAULTS = {LENGTH: 512, BATCH: 2048, THREADS: 4, FLASH: 2**32 - 1, TYPES: 1, TYPES + 1: 1}


def library(path: str) -> Any:
    """Return the C interface."""
    found = ctypes.CDLL(path)
    found.llama_model_default_params.restype = Parameters
    found.llama_context_default_params.restype = Parameters
    found.llama_model_load_from_file.restype = ctypes.c_void_p
    found.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
    found.llama_init_from_model.restype = ctypes.c_void_p
    found.llama_init_from_model.argtypes = [ctypes.c_void_p, Parameters]
    found.llama_get_memory.restype = ctypes.c_void_p
    found.llama_get_memory.argtypes = [ctypes.c_void_p]
    found.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    found.llama_model_get_vocab.restype = ctypes.c_void_p
    found.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    found.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    found.llama_batch_init.restype = Batch
    found.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    found.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    found.llama_get_logits.argtypes = [ctypes.c_void_p]
    return found


def logits_of(model: str, cores: int, context: int, *, float32: bool) -> Answer:
    """Load a model, and return what writes the logits of tokens to a file."""
    from xllamacpp import xllamacpp

    c = library(xllamacpp.__file__)
    c.ggml_backend_load_all()
    loaded = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
    assert loaded, model
    parameters = c.llama_context_default_params()
    found = {place: parameters.words[place] for place in DEFAULTS}
    assert found == DEFAULTS, f"another layout of parameters: {found}"
    parameters.words[LENGTH] = parameters.words[BATCH] = context
    parameters.words[THREADS] = parameters.words[THREADS + 1] = cores
    if float32:  # of keys and values, which flash attention does not take
        parameters.words[TYPES] = parameters.words[TYPES + 1] = parameters.words[FLASH] = 0
    state = c.llama_init_from_model(loaded, parameters)
    assert state, model
    width = c.llama_vocab_n_tokens(c.llama_model_get_vocab(loaded))
    batch = c.llama_batch_init(context, 0, 1)

    def answer(ids: list[int], path: str) -> dict[str, Any]:
        c.llama_memory_clear(c.llama_get_memory(state), True)
        batch.count = len(ids)
        for place, token in enumerate(ids):
            batch.tokens[place], batch.positions[place] = token, place
            batch.numbers_of_rows[place], batch.rows[place][0] = 1, 0
            batch.wanted[place] = 1
        code = c.llama_decode(state, batch)
        assert code == 0, code
        logits = ctypes.string_at(c.llama_get_logits(state), 4 * width * len(ids))
        Path(path).write_bytes(logits)
        return {"rows": len(ids)}

    return answer


def encode(numbers: list[int], path: str) -> dict[str, Any]:
    """Replace the weights in a file by their blocks of a type."""
    from xllamacpp import xllamacpp

    kind, rows, columns = numbers
    c = ctypes.CDLL(xllamacpp.__file__)
    c.ggml_quantize_chunk.restype = ctypes.c_size_t
    counts = [ctypes.c_int64] * 3
    c.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, *counts, ctypes.c_void_p
    ]  # fmt: skip
    weights = Path(path).read_bytes()
    blocks = ctypes.create_string_buffer(len(weights))
    started = time.process_time()
    size = c.ggml_quantize_chunk(kind, weights, blocks, 0, rows, columns, None)
    seconds = time.process_time() - started
    Path(path).write_bytes(blocks.raw[:size])
    return {"cpu_s": seconds}


def plain_of(model: str, cores: int, context: int) -> Answer:
    """Start a server, and return what asks it for a number of tokens."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = cores
    parameters.warmup = True
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)  # runs as long as the function below refers to it

    def answer(ids: list[int], count: str) -> dict[str, Any]:
        request = {"prompt": ids, "n_predict": int(count)}
        request |= {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
        started, cpu = time.perf_counter(), time.process_time()
        address = server.listening_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address)  # the server closes idle ones
        connection.request("POST", "/completion", json.dumps(request | {"return_tokens": True}))
        found = json.loads(connection.getresponse().read())
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        decoding = found["timings"]["predicted_ms"] / 1e3
        return {
            "prefill_s": seconds - decoding,
            "decode_s": decoding,
            "cpu_s": cpu,
            "tokens": found["tokens"],
        }

    return answer


def main() -> None:
    """Load the model and answer until standard input ends; with float32, only logits.

    "-" is no model, for `encode`.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints, too
    import xllamacpp

    model, cores, context, *more = sys.argv[1:]
    float32 = more == ["float32"]
    answers: dict[str, Answer] = {"encode": encode}
    if not float32 and model != "-":
        answers["plain"] = plain_of(model, int(cores), int(context))
    print(json.dumps({"ready": True, "version": xllamacpp.__version__}), file=output, flush=True)
    for line in sys.stdin:
        mode, first, ids, *_ = line.split()
        if mode == "logits" and mode not in answers:
            answers[mode] = logits_of(model, int(cores), int(context), float32=float32)
        answer = answers[mode]([int(i) for i in ids.split(",")], first)
        print(json.dumps(answer), file=output, flush=True)
    os._exit(0)  # without waiting for the server's threads


if __name__ == "__main__":
    main()
