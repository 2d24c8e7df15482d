"""Run twice by test_sharding, as two hosts on one machine: prints what each of them says."""

import json
import sys

import jax


def main() -> None:
    """Arguments: the coordinator's address, and which host this is."""
    address, host = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(address, num_processes=2, process_id=host)
    from dflash_jax import Plan
    from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

    target = tiny_target(num_layers=2, vocab_size=96)
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    said = []
    for mesh in ((2, 1), (1, 2)):
        plan = Plan(rows=2, max_length=64, chunk=16, block=4, mesh=mesh, dtype="float32")
        results = random_engine(target, drafter, plan).generate_many(
            [[1, 2, 3], list(range(20))], max_tokens=8
        )
        said.append([r.token_ids for r in results])
    print(json.dumps({"said": said, "devices": jax.device_count()}))


if __name__ == "__main__":
    main()
