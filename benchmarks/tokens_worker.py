"""Token ids of texts by llama.cpp or transformers, run with the Python that has the library.

    python tokens_worker.py llama.cpp MODEL.gguf < TEXTS.json > IDS.json
    python tokens_worker.py transformers FOLDER < TEXTS.json > IDS.json

llama.cpp is that of `pip install xllamacpp`, asked over HTTP as its users do. Texts begin with the
model's start token if it has one, and special tokens that are written out count.
"""

import http.client
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

CLIENTS = 32


def llama_cpp(model: str, texts: list[str]) -> tuple[str, list[list[int]]]:
    """Return the version, and the answers of the server's /tokenize."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = 1
    parameters.warmup = False
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)
    address = server.listening_address.removeprefix("http://")

    def tokens(text: str) -> list[int]:
        connection = http.client.HTTPConnection(address)
        request = {"content": text, "add_special": True, "parse_special": True}
        connection.request("POST", "/tokenize", json.dumps(request))
        return json.loads(connection.getresponse().read())["tokens"]

    with ThreadPoolExecutor(CLIENTS) as clients:  # each waits most of the time
        found = list(clients.map(tokens, texts))
    return f"xllamacpp {xllamacpp.__version__}", found


def transformers(folder: str, texts: list[str]) -> tuple[str, list[list[int]]]:
    """Return the version, and what AutoTokenizer makes of the texts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return f"transformers {transformers.__version__}", [tokenizer(text).input_ids for text in texts]


if __name__ == "__main__":
    readers = {"llama.cpp": llama_cpp, "transformers": transformers}
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    version, ids = readers[sys.argv[1]](sys.argv[2], json.load(sys.stdin))
    json.dump({"version": version, "ids": ids}, output)
    output.close()
    os._exit(0)  # without waiting for the server's threads
