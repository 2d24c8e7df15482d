"""The prebuilt llama.cpp as a worker or a server, for a Python with `pip install xllamacpp`.

    python prebuilt.py MODEL.gguf CORES CONTEXT [--float32]
    python prebuilt.py MODEL.gguf CORES CONTEXT --port PORT [--rows 8]

Requests and replies are those of llama_worker.cpp, plain decoding and logits. The library's server
is asked over HTTP, as its users do; logits, which it does not serve, come from its C interface,
with keys and values in float16, its default, or in float32. "encode FILE TYPE,ROWS,COLUMNS" turns a
file of float32 into blocks, "tokens FILE" a file with a list of texts as JSON into their ids: texts
begin with the model's start token if it has one, and special tokens that are written out count.

With --port, clients are served at that port until the process is ended.
"""

import argparse
import ctypes
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Answer = Callable[[list[int], str], dict[str, Any]]
CLIENTS = 32  # that ask for tokens at a time; each waits most of the time


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
LENGTH = 0
BATCH = 1
THREADS = 7
FLASH = 13
TYPES = 26
DEFAULTS = {LENGTH: 512, BATCH: 2048, THREADS: 4, FLASH: 2**32 - 1, TYPES: 1, TYPES + 1: 1}


def library(path: str) -> Any:
    """Return the C interface."""
    interface = ctypes.CDLL(path)
    interface.llama_model_default_params.restype = Parameters
    interface.llama_context_default_params.restype = Parameters
    interface.llama_model_load_from_file.restype = ctypes.c_void_p
    interface.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
    interface.llama_init_from_model.restype = ctypes.c_void_p
    interface.llama_init_from_model.argtypes = [ctypes.c_void_p, Parameters]
    interface.llama_get_memory.restype = ctypes.c_void_p
    interface.llama_get_memory.argtypes = [ctypes.c_void_p]
    interface.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    interface.llama_model_get_vocab.restype = ctypes.c_void_p
    interface.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    interface.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    interface.llama_batch_init.restype = Batch
    interface.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    interface.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    interface.llama_get_logits.argtypes = [ctypes.c_void_p]
    return interface


def logits_of(model: str, cores: int, context: int, *, float32: bool) -> Answer:
    """Load a model, and return what writes the logits of tokens to a file."""
    from xllamacpp import xllamacpp

    c = library(xllamacpp.__file__)
    c.ggml_backend_load_all()
    loaded = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
    assert loaded, model
    parameters = c.llama_context_default_params()
    defaults = {place: parameters.words[place] for place in DEFAULTS}
    assert defaults == DEFAULTS, f"another layout of parameters: {defaults}"
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
            batch.tokens[place] = token
            batch.positions[place] = place
            batch.numbers_of_rows[place] = 1
            batch.rows[place][0] = 0
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


class Server:
    """The library's server for a model."""

    def __init__(self, options: argparse.Namespace):
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = options.model
        parameters.n_ctx = options.context
        parameters.n_parallel = options.rows
        parameters.cpuparams.n_threads = options.cores
        parameters.cpuparams_batch.n_threads = options.cores
        parameters.warmup = True
        parameters.verbosity = 0
        if options.port:
            parameters.port = options.port
        self._server = xllamacpp.Server(parameters)  # runs as long as it is referred to

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        address = self._server.listening_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address)  # the server closes idle ones
        connection.request("POST", path, json.dumps(body))
        return json.loads(connection.getresponse().read())

    def plain(self, ids: list[int], count: str) -> dict[str, Any]:
        """Return a number of greedy tokens, and the seconds they took."""
        request = {"prompt": ids, "n_predict": int(count), "return_tokens": True}
        request |= {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
        started = time.perf_counter()
        cpu = time.process_time()
        completion = self.post("/completion", request)
        seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu
        decoding = completion["timings"]["predicted_ms"] / 1e3
        return {
            "prefill_s": seconds - decoding,
            "decode_s": decoding,
            "cpu_s": cpu,
            "tokens": completion["tokens"],
        }

    def tokens(self, _: list[int], path: str) -> dict[str, Any]:
        """Replace the texts in a file by their ids."""

        def ids(text: str) -> list[int]:
            request = {"content": text, "add_special": True, "parse_special": True}
            return self.post("/tokenize", request)["tokens"]

        texts = json.loads(Path(path).read_text(encoding="utf-8"))
        with ThreadPoolExecutor(CLIENTS) as clients:
            token_ids = list(clients.map(ids, texts))
        Path(path).write_text(json.dumps(token_ids), encoding="utf-8")
        return {"texts": len(texts)}


def main() -> None:
    """Load the model and answer until standard input ends, or serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help='"-" for requests that need none')
    parser.add_argument("cores", type=int)
    parser.add_argument("context", type=int, help="tokens, of all rows together")
    parser.add_argument("--float32", action="store_true", help="keys and values; only for logits")
    parser.add_argument("--port", type=int, help="serve clients")
    parser.add_argument("--rows", type=int, default=1, help="requests at a time")
    options = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints, too
    import xllamacpp

    answers: dict[str, Answer] = {"encode": encode}
    if not options.float32 and options.model != "-":
        server = Server(options)
        answers |= {"plain": server.plain, "tokens": server.tokens}
    if options.port:
        signal.pause()
    first = {"ready": True, "version": f"xllamacpp {xllamacpp.__version__}"}
    print(json.dumps(first), file=output, flush=True)
    for line in sys.stdin:
        mode, path_or_count, *ids = line.split()
        if mode == "logits" and mode not in answers:
            answers[mode] = logits_of(
                options.model, options.cores, options.context, float32=options.float32
            )
        numbers = [int(i) for i in ids[0].split(",")] if ids else []
        print(json.dumps(answers[mode](numbers, path_or_count)), file=output, flush=True)
    os._exit(0)  # without waiting for the server's threads


if __name__ == "__main__":
    main()
