"""Makes llama_splits.json: token ids of llama.cpp for texts, by the name of the word pattern.

    g++ -std=c++17 -I $LLAMA/include -I $LLAMA/ggml/include llama_ids.cpp -o llama_ids \\
        -L $BUILD/src -L $BUILD/ggml/src -lllama -lggml -lggml-cpu -lggml-base -fopenmp
    python make_llama_splits.py ./llama_ids  # needs gguf and tokenizers

The library is that of llama.cpp (made with the one of llama-cpp-python 0.3.36). Merges are learned
across words, so the ids show where a text was split. The texts keep to characters for which
llama.cpp's patterns are the published ones: of some families, it does not see the case of letters
within a word, or outside ASCII, and it does not normalise.
"""

import json
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import gguf
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from dflash_jax.converters.gguf.pre_tokenizers import PRE_TOKENIZERS  # noqa: E402

TEXTS = [
    "Hello world! it's 12345 o'clock\n\n  indented\tTABS",
    "def f(x):\r\n    return x**2  # ünïcödé 🎉",
    "We'LL SEE they'Re  gone  ",
    "x=1234567890; y = 3.14,5/6//7\n\n\n\n   z",
    "東京タワー123円。、\uff01\uff1f 한국어 123 ㄱㄴ",
    "  \n \n\t\t x  \r\n\r\n y",
    "$100 <b>tag</b> [a](b) a_b-c ~~ ``code`` +1 ^2 |",
    "a  b   c    d     e                    f",
    "snake_case, Html Parser, xml http request: IO",
    "'s 't're 'tis don't DON'T l'été",
    "123 4567 12 1 1,234,567",
    "。你好\uff0c世界。Hello。",
    " (normal) ✅ 🦙🦙 3 33 333 3333 33333 333333 3..3 3...3",
    "Привет, мир! ½ ⅣⅤ",
]


def vocabulary() -> tuple[list[str], list[str]]:
    """Return the tokens, and the merges, each two tokens."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=560, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    model = json.loads(core.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def write(path: Path, pre: str, tokens: list[str], merges: list[str]) -> None:
    """Write a file with nothing but a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(program: str) -> None:
    """Write llama_splits.json."""
    tokens, merges = vocabulary()
    found: dict[str, dict[str, list[str]]] = {text: defaultdict(list) for text in TEXTS}
    encoded = [text.encode() for text in TEXTS]
    stream = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        for pre in PRE_TOKENIZERS:
            write(path, pre, tokens, merges)
            printed = subprocess.check_output([program, path], input=stream).decode()
            for text, ids in zip(TEXTS, printed.splitlines(), strict=True):
                found[text][ids].append(pre)
    ids = {text: {k: " ".join(v) for k, v in by.items()} for text, by in found.items()}
    made = {"tokens": tokens, "merges": merges, "ids": ids}
    out = HERE / "llama_splits.json"
    out.write_text(json.dumps(made, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
