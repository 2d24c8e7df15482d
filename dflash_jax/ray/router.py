"""Choice of a replica: the one with the prefix of the conversation, unless its queue is long."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from dflash_jax.ray.calls import ranked


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
