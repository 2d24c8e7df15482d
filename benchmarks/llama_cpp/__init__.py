"""Our engine beside llama.cpp, on the same GGUF files and token ids.

`python -m benchmarks.llama_cpp` times decoding and prefill. `settings.py` has the cells of its
table and their options, `files.py` the files of models, `worker.py` the processes that answer
requests: our engine (`ours.py`), llama.cpp with drafts (`llama_worker.cpp`, which `build.py`
compiles), and the prebuilt llama.cpp of PyPI (`prebuilt.py`). `benchmarks.gguf_files`,
`gguf_tokenizers` and `serving` use the latter, too.
"""
