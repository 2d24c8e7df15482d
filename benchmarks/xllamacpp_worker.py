"""The prebuilt llama.cpp as a worker, run with a Python that has `pip install xllamacpp`.

    python xllamacpp_worker.py MODEL.gguf CORES CONTEXT

Requests and replies are those of llama_worker.cpp, plain decoding only. The library's server is
asked over HTTP, as its users do.
"""

import http.client
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load the model and answer until standard input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints, too
    import xllamacpp

    model, cores, context = sys.argv[1:]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = int(context)
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(cores)
    parameters.warmup = True
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)

    address = server.listening_address.removeprefix("http://")

    def answer(line: str) -> dict[str, Any]:
        mode, count, ids, *_ = line.split()
        assert mode == "plain", mode
        request = {"prompt": [int(i) for i in ids.split(",")], "n_predict": int(count)}
        request |= {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
        started, cpu = time.perf_counter(), time.process_time()
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

    print(json.dumps({"ready": True, "version": xllamacpp.__version__}), file=output, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=output, flush=True)
    os._exit(0)  # without waiting for the server's threads


if __name__ == "__main__":
    main()
