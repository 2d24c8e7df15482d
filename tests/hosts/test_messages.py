"""Frames, the proof of the token, and the encoding of messages."""

import socket
import threading
from collections.abc import Iterator

import ml_dtypes
import msgspec
import numpy as np
import pytest

from dflash_jax.errors import HostError
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.hosts import channel as channel_module
from dflash_jax.hosts import messages
from dflash_jax.hosts.channel import Channel
from dflash_jax.hosts.messages import HostArray, pack, unpack


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = Channel(socket.create_connection(server.getsockname()))
        second = Channel(server.accept()[0])
    yield first, second
    first.close()
    second.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([True, False]),
        np.uint32(2**32 - 1),
        np.zeros((0, 4), np.float32),
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
    ],
)
def test_arrays_pass_bit_for_bit(array: np.ndarray) -> None:
    entry = messages.Put(3, pack(array))
    read = messages.decode_entry(messages.encode(entry))
    assert isinstance(read, messages.Put)
    got = unpack(read.value)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()


def test_calls_keep_handles_and_values_apart() -> None:
    key = str(ProgramKey(Step.PLAIN, Variant.GREEDY))
    call = messages.CallProgram(key, True, 5, 0, [7, pack(np.int32(7))], 9)
    read = messages.decode_entry(messages.encode(call))
    assert read == call
    assert isinstance(read, messages.CallProgram)
    assert read.inputs[0] == 7
    assert isinstance(read.inputs[1], HostArray)
    for known in (
        ProgramKey(Step.PLAIN, Variant.GREEDY),
        ProgramKey(Step.COPY_ROW),
        ProgramKey(Step.SPECULATIVE, Variant.SAMPLED),
    ):
        assert ProgramKey.parse(str(known)) == known
    assert read.key == "plain[greedy]"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (HostArray("object", (1,), b"\0" * 8), "cannot create an OBJECT array"),
        (HostArray("int32", (3,), b"\0" * 8), "cannot reshape"),
        (HostArray("int32", (-1, 5), b"\0" * 8), "cannot reshape"),
    ],
)
def test_arrays_that_cannot_be_are_refused(value: HostArray, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack(value)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", messages.encode(["Run", "x"])])
def test_messages_of_no_known_kind_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_entry(data)


def test_frames_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    frames = [b"", b"x", bytes(range(256)) * 8000]
    sender = threading.Thread(target=lambda: [first.send(frame) for frame in frames])
    sender.start()
    assert [second.receive() for _ in frames] == frames
    sender.join()
    second.send(b"12345")
    with pytest.raises(OSError, match="a frame of 5 bytes; expected at most 4"):
        first.receive(4)
    first.close()
    with pytest.raises(EOFError):
        second.receive()


def authenticate(ends: tuple[Channel, Channel], *tokens: str, fronts: tuple[bool, ...]) -> list:
    found: list[HostError | None] = [None, None]

    def prove(at: int) -> None:
        try:
            ends[at].authenticate(tokens[at], front=fronts[at])
        except HostError as error:
            found[at] = error

    threads = [threading.Thread(target=prove, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_both_ends_prove_that_they_have_the_token(ends: tuple[Channel, Channel]) -> None:
    assert authenticate(ends, "secret", "secret", fronts=(True, False)) == [None, None]
    ends[0].send(b"hello")
    assert ends[1].receive() == b"hello"


@pytest.mark.parametrize(
    ("tokens", "fronts"),
    [(("secret", "other"), (True, False)), (("secret", "secret"), (True, True))],
)
def test_other_tokens_and_mirrored_proofs_are_refused_by_both_ends(
    ends: tuple[Channel, Channel], tokens: tuple[str, str], fronts: tuple[bool, bool]
) -> None:
    for error in authenticate(ends, *tokens, fronts=fronts):
        assert "a connection has another token" in str(error)


def test_a_connection_that_says_nothing_is_refused_in_time(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.05)
    with pytest.raises(HostError, match="did not prove that it has the token"):
        ends[0].authenticate("secret", front=True)
