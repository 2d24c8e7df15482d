"""The application of Ray Serve: one gateway, and replicas that each have an engine."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from dflash_jax.errors import ComputeError, RequestError
from dflash_jax.ray.calls import Call, ranked
from dflash_jax.ray.gateway import Gateway
from dflash_jax.ray.options import given_options, scaling_options
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.protocol import Problem

# Choice of a replica: the one with the prefix of the conversation, unless its queue is long.


class ConversationRouter(RequestRouter):
    """Sends the requests of a conversation to one replica.

    The replica follows from a hash of the conversation and of the replica's id (rendezvous
    hashing): routers need no common state, and a new replica takes over its share of conversations
    only. Requests that belong to no conversation go to the shortest queue.
    """

    _longer = 8

    def initialize_state(self, longer: int = 8, **kwargs: Any) -> None:
        """Take over `request_router_kwargs`.

        Args:
          longer: by how many requests the queue of a conversation's replica may be longer than the
            shortest one before its requests go elsewhere.
        """
        self._longer = longer

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas to try in order, each from its shortest queue on."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        call = pending_request.args[0]
        return ranked(
            candidate_replicas,
            call.conversation,
            name=lambda replica: replica.replica_id.unique_id,
            queue=lambda replica: self.replica_queue_len_cache.get(replica.replica_id) or 0,
            longer=None if call.pinned else self._longer,
        )


# A replica: the server's ASGI application over engines of its own, in an actor of Ray Serve.


LEAVE_S = 10.0  # seconds in which the application ends a request whose client left


class Replica:
    """Answers calls of the gateway by the server's application.

    Args:
      options: those of `dflash-jax serve`.
    """

    async def __init__(self, options: ServeOptions):
        from dflash_jax.graph.build import BackgroundCompiler
        from dflash_jax.server.configuration import configuration, normalized
        from dflash_jax.server.run import log_to_stderr, new_server

        options = normalized(options)
        log_to_stderr(quiet=options.quiet)
        engines, config = await asyncio.to_thread(configuration, options)
        self._server = new_server(engines, config, [config.host], BackgroundCompiler())
        workers = [model.worker for model in self._server.models]
        ready = asyncio.gather(*(worker.ready.wait() for worker in workers))
        ends = [asyncio.ensure_future(worker.ended.wait()) for worker in workers]
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        for future in (ready, *ends):
            future.cancel()
        self.check_health()

    def check_health(self) -> None:
        """Check that the replica can answer, as /ready does; Ray Serve replaces it otherwise.

        Raises:
          ComputeError: an engine could not be loaded, or failed.
        """
        for model in self._server.models:
            try:
                _ = model.engine
                model.check_turns()
            except Problem as problem:  # which cannot be sent to another process
                raise ComputeError(f"{model.name}: {problem.message}") from None

    async def __call__(self, call: Call) -> AsyncGenerator[dict[str, Any]]:
        """Yield the messages of the ASGI response; the request ends when the generator closes."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        bodies = [call.body]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            messages.put_nowait(dict(message))

        answer = asyncio.ensure_future(self._server.app(dict(call.scope), receive, send))
        answer.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            answer.result()
        finally:
            left.set()
            await asyncio.wait([answer], timeout=LEAVE_S)
            answer.cancel()

    async def __del__(self) -> None:
        """Close the engines, called by Ray Serve once no request runs."""
        if hasattr(self, "_server"):
            await asyncio.gather(*(model.worker.stop() for model in self._server.models))


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
