"""`dflash-jax explain`: what a plan turns into, without weights."""

import argparse
import json
from typing import Any

from dflash_jax.cli.options import (
    chosen_drafter,
    chosen_plan,
    model_options,
    new_verb,
    open_pair,
    use_compilation_cache,
)
from dflash_jax.errors import RequestError


def add_verb(verbs: Any) -> None:
    """Adds `explain` to the command line."""
    verb = new_verb(verbs, "explain", run, "Show plan, memory, programs and rooflines.")
    verb.add_argument("--device", help="roofline for this device, e.g. H200 (default: this one)")
    verb.add_argument("--no-compile", action="store_true", help="arithmetic only")
    verb.add_argument("--params", action="store_true", help="list every parameter")
    verb.add_argument("--stablehlo", metavar="PROGRAM", help="print a program's StableHLO instead")
    verb.add_argument("--hlo", metavar="PROGRAM", help="print a program's optimised HLO instead")
    verb.add_argument("--json", action="store_true")
    model_options(verb)


def run(options: argparse.Namespace) -> int:
    """`dflash-jax explain`."""
    use_compilation_cache()

    from dflash_jax import loading
    from dflash_jax.compiler import compile_programs, declare
    from dflash_jax.compiler.explain import explain as report
    from dflash_jax.compiler.roofline import DEVICES, find_device
    from dflash_jax.device import default_device

    target, drafter = loading.describe(
        options.target, chosen_drafter(options), taps_at=options.taps_at
    )
    if options.device and options.device not in DEVICES:
        raise RequestError(f"device {options.device!r} is unknown; known: {', '.join(DEVICES)}")
    device = DEVICES.get(options.device or "") or find_device(default_device().device_kind)
    plan = chosen_plan(options)
    if plan.weights == "packed":
        plan = open_pair(options).with_stored(plan)
    if options.device:
        from dflash_jax.compiler import resolve

        platform = "cpu" if device.name == "CPU" else "gpu"
        plan = resolve(plan, target, drafter, platform=platform, memory=device.memory)
    else:
        plan = loading.resolve_here(plan, target, drafter)
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
