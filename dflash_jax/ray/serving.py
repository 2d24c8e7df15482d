"""The application of Ray Serve: one gateway, and replicas that each have an engine.

The gateway passes HTTP requests to replicas, and survives a replica's end.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, MutableMapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dflash_jax.errors import ComputeError
from dflash_jax.ray import SCALING, given_options, scaling_options
from dflash_jax.ray.calls import Call, Conversations, ranked
from dflash_jax.ray.hosts import gpus_per_node
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.protocol import Problem
from dflash_jax.utils.addresses import free_address, split_address
from dflash_jax.utils.command import Terminated

log = logging.getLogger("dflash_jax.ray")
ATTEMPTS = 3  # replicas that may end before one of them answers
LARGE_BODY = 2**16  # bytes; larger ones are decoded in a thread
RETRY_S = 5  # seconds


class Gateway:
    """Passes every request to a replica, and its response back, piece by piece.

    A request whose replica ends before it answers is passed to another one.

    Args:
      replicas: handle of the replicas.
      max_body: bytes of a body to read; a replica refuses what is longer.
    """

    def __init__(self, replicas: DeploymentHandle, max_body: int):
        self._replicas = replicas.options(stream=True)
        self._max_body = max_body
        self._conversations = Conversations()

    async def __call__(self, request: Request) -> Response:
        call = await self._read(request)
        for _ in range(ATTEMPTS):
            stream = self._replicas.remote(call)
            try:
                start = await anext(messages := aiter(stream))
                return self._relayed(call, start, messages, stream)
            except asyncio.CancelledError:  # the client left
                stream.cancel()
                raise
            except BackPressureError:
                busy = Problem(
                    "the queue is full; try again", status=503, code="queue_full", retry_s=1
                )
                return _refusal(busy)
            except (RayActorError, RayServeException, StopAsyncIteration) as error:
                log.warning("a replica ended before it answered: %s", error)
        return _refusal(_ended())

    async def _read(self, request: Request) -> Call:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                break
        arguments = dict(request.scope), bytes(body[: self._max_body + 1])
        if len(body) > LARGE_BODY:
            return await asyncio.to_thread(self._conversations.call, *arguments)
        return self._conversations.call(*arguments)

    def _relayed(
        self, call: Call, start: dict[str, Any], messages: AsyncIterator[Any], stream: Any
    ) -> Response:
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"x-request-id"]
        response = StreamingResponse(
            self._pieces(call, headers, messages, stream), status_code=start["status"]
        )
        response.raw_headers = headers  # Ray adds the id of the request
        return response

    async def _pieces(
        self,
        call: Call,
        headers: list[tuple[bytes, bytes]],
        messages: AsyncIterator[Any],
        stream: Any,
    ) -> AsyncGenerator[bytes]:
        """Yield the body; an event stream ends with an error if its replica does."""
        first = True
        try:
            async for message in messages:
                piece = message.get("body", b"")
                if first:
                    self._conversations.remember(call, piece)
                first = False
                if piece:
                    yield piece
        except (RayActorError, RayServeException) as error:
            log.warning("a replica ended while it answered: %s", error)
            if not any(value.startswith(b"text/event-stream") for _, value in headers):
                raise
            yield error_events(call.scope["path"], _ended())
        finally:
            stream.cancel()


def error_events(path: str, problem: Problem) -> bytes:
    """Return the events that end a stream of this route with an error."""
    data = b"data: " + json.dumps(problem.to_json()).encode() + b"\n\n"
    if path.endswith(("/messages", "/responses")):
        return b"event: error\n" + data
    return data + b"data: [DONE]\n\n"


def _ended() -> Problem:
    return Problem(
        "the replica that served the request ended; try again",
        status=503,
        code="replica_ended",
        retry_s=RETRY_S,
    )


def _refusal(problem: Problem) -> Response:
    headers = {"Retry-After": str(problem.retry_s)}
    body = json.dumps(problem.to_json())
    return Response(body, problem.status, headers, "application/json")


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
        from dflash_jax.graph.background import BackgroundCompiler
        from dflash_jax.server.access_log import log_to_stderr
        from dflash_jax.server.configuration import configuration, normalized
        from dflash_jax.server.run import new_server

        options = normalized(options)
        if options.hosts > 1:
            await self._join(options)
        log_to_stderr(quiet=options.quiet, form=options.log_format)
        engines, config = await asyncio.to_thread(configuration, options)
        self._server = new_server(engines, config, [config.host], BackgroundCompiler())
        threads = [model.engine_thread for model in self._server.models]
        ready = asyncio.gather(*(thread.ready.wait() for thread in threads))
        ends = [asyncio.ensure_future(thread.ended.wait()) for thread in threads]
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        for future in (ready, *ends):
            future.cancel()
        self.check_health()

    async def _join(self, options: ServeOptions) -> None:
        """Become process 0 of several hosts, which end with this one, as it does with them."""
        from dflash_jax.server import serving_hosts

        address = free_address(ray.util.get_node_ip_address())
        options = dataclasses.replace(options, host_index=0, coordinator=address)
        self._followers = start_followers(options)  # they end when nobody refers to them
        await asyncio.to_thread(serving_hosts.join, options)

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
            await asyncio.gather(*(model.engine_thread.stop() for model in self._server.models))


MOST_BODY = 32 * 2**20  # bytes; as much as a server reads by default
GRACE_S = 10.0  # seconds after a drain in which a replica closes
GATEWAY_REQUESTS = 10_000  # at a time, per gateway; they only wait


def application(args: Mapping[str, Any]) -> Any:
    """Return the application; arguments and errors as for `dflash_jax.ray.app`."""
    options, scaling = given_options(args, os.environ)
    return _application(options, scaling_options(scaling, options.plan.rows))


def _application(options: ServeOptions, scaling: dict[str, Any]) -> Any:
    """Return the application, given options of the deployment of replicas.

    Each replica of several hosts has a placement group, and is process 0 in its first bundle.
    """
    rows = options.plan.rows
    if options.hosts > 1:
        scaling = scaling | {
            "placement_group_bundles": [_bundle(scaling["ray_actor_options"])] * options.hosts,
            "placement_group_strategy": "SPREAD",
        }
    replica = serve.deployment(
        Replica,
        name="Replica",
        **scaling,
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


def _bundle(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a host, as placement groups name them."""
    bundle = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    return {name: amount for name, amount in bundle.items() if amount}


def serve_one_model(options: ServeOptions, listening: Callable[[str], object]) -> None:
    """Serve one model over hosts of the cluster until a signal arrives.

    Args:
      listening: called with the URL once the model is served.
    """
    from dflash_jax.server.run import url_of

    port = options.port or split_address(free_address())[1]
    scaling = scaling_options(SCALING | {"gpus": str(gpus_per_node())}, options.plan.rows)
    serve.start(http_options={"host": options.host, "port": port})
    try:
        with contextlib.suppress(KeyboardInterrupt, Terminated):
            serve.run(_application(dataclasses.replace(options, ray=None), scaling))
            listening(url_of(options.host, port))
            while True:
                time.sleep(1.0)
    finally:
        serve.shutdown()


class Follower:
    """A host of a replica that is not its first, in an actor of its own."""

    def follow(self, options: ServeOptions) -> None:
        """Follow the replica's engine; the process ends with the replica."""
        from dflash_jax.server import serving_hosts

        serving_hosts.run(options, lambda: 1)


def start_followers(options: ServeOptions) -> list[Any]:
    """Start the other hosts of a replica, in the other bundles of its placement group."""
    group = ray.util.get_current_placement_group()
    followers: list[Any] = []
    for index in range(1, options.hosts):
        bundle = group.bundle_specs[index]
        actor = ray.remote(Follower).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        )
        follower = actor.remote()
        follower.follow.remote(dataclasses.replace(options, host_index=index))
        followers.append(follower)
    return followers
