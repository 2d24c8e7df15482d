"""The application of Ray Serve: one gateway, and replicas that each have an engine."""

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from dflash_jax.errors import RequestError
from dflash_jax.ray.gateway import Gateway
from dflash_jax.ray.options import given_options, scaling_options
from dflash_jax.ray.replica import Replica
from dflash_jax.ray.router import ConversationRouter

MOST_BODY = 32 * 2**20  # bytes; as much as a server reads by default
GRACE_S = 10.0  # seconds after a drain in which a replica closes
GATEWAY_REQUESTS = 10_000  # at a time, per gateway; they only wait


def application(args: Mapping[str, Any]) -> Any:
    """Return the application; arguments and errors as for `dflash_jax.ray.app`."""
    options, scaling = given_options(args, os.environ)
    if options.hosts > 1:
        raise RequestError(
            f"hosts is {options.hosts}, but a replica has one process; serve a model over several"
            " hosts by `dflash-jax serve --hosts N --ray ADDRESS`"
        )
    rows = options.plan.rows
    replica = serve.deployment(
        Replica,
        name="Replica",
        **scaling_options(scaling, rows),
        max_ongoing_requests=options.queue,
        max_queued_requests=options.queue,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.drain + GRACE_S,
        request_router_config=RequestRouterConfig(
            request_router_class=ConversationRouter, request_router_kwargs={"longer": 2 * rows}
        ),
    )
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=options.drain + GRACE_S,
    )
    return gateway.bind(replica.bind(options), options.max_body or MOST_BODY)
