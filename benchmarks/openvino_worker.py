"""OpenVINO GenAI as a worker of benchmarks.openvino; run by a Python that has `openvino-genai`.

    PYTHON benchmarks/openvino_worker.py FILE.gguf

Each line of standard input is a JSON object with `ids`, one prompt for each row, and `tokens`; the
reply has seconds from the call to the first token, and from there to the last.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    """Load the model with the library's defaults, and answer until standard input ends."""
    import numpy as np
    import openvino  # type: ignore
    import openvino_genai  # type: ignore

    pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
    print(json.dumps({"version": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        ids = np.asarray(asked["ids"], np.int64)
        config = openvino_genai.GenerationConfig(
            max_new_tokens=asked["tokens"], ignore_eos=True, do_sample=False
        )
        arrays = (openvino.Tensor(array) for array in (ids, np.ones_like(ids)))
        started = time.perf_counter()
        result = pipeline.generate(openvino_genai.TokenizedInputs(*arrays), config)
        seconds = time.perf_counter() - started
        first = result.perf_metrics.get_ttft().mean / 1e3
        said = {"prefill_s": first, "decode_s": seconds - first, "tokens": result.tokens}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
