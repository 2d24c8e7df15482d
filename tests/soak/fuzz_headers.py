"""100 000 mutated weight files: each is read, or refused by name, quickly and in little memory.

    python tests/soak/fuzz_headers.py [--count N] [--json FILE]

Exits 1 at the first file that crashes, allocates 64 MiB or takes a second; it is kept for study.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "converters")]

import numpy as np  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from mutations import SLOW, Seed, measured, mutated, seeds  # noqa: E402

MEMORY = 64 << 20
SEEDS = 3


def run_seed(index: int, count: int) -> tuple[str, dict]:
    """All mutations of one valid file, in a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        valid = seeds(Path(name))[index]
        try:
            return valid.name, run(valid, count, Path(name))
        except BaseException:
            kept = Path(tempfile.gettempdir()) / f"fuzz-failure-{valid.name}"
            kept.write_bytes((Path(name) / valid.name).read_bytes())
            print(f"the file is kept at {kept}", file=sys.stderr)
            raise


def run(valid: Seed, count: int, folder: Path) -> dict:
    """Outcomes of `count` mutations of one file, and the worst time and memory seen."""
    outcomes: Counter[str] = Counter()
    worst = {"seconds": 0.0, "bytes": 0}
    path = folder / valid.name

    @seed(1)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(raw=mutated(valid))
    def check(raw: bytes) -> None:
        path.write_bytes(raw)
        outcome, seconds, peak = measured(path)
        outcomes[outcome] += 1
        worst["seconds"] = max(worst["seconds"], seconds)
        worst["bytes"] = max(worst["bytes"], peak)
        if seconds >= SLOW or peak >= MEMORY:
            raise AssertionError(f"{seconds:.2f} s, {peak / 2**20:.0f} MiB")

    check()
    return {"files": sum(outcomes.values()), "outcomes": dict(outcomes), "worst": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    report = {"python": platform.python_version(), "numpy": np.__version__, "seeds": {}}
    with ProcessPoolExecutor(max_workers=SEEDS) as pool:
        share = -(-options.count // SEEDS)
        report["seeds"] = dict(pool.map(run_seed, range(SEEDS), [share] * SEEDS))
    report["files"] = sum(found["files"] for found in report["seeds"].values())
    report["minutes"] = round((time.time() - began) / 60, 1)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
