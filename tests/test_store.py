"""Files of caches are complete or absent, checked when they are read, and limited in number."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_jax.utils.private_folder import UnsafeFolderError
from dflash_jax.utils.store import ENVIRONMENT, Store, default_store

SIZE = 1 << 20


def opened(tmp_path: Path, *, size: int = SIZE) -> Store:
    return Store(tmp_path / "cache", ".entry", size=size)


def test_what_was_put_is_read_until_it_is_replaced_or_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.get("a") is None
    for parts in ([b"one", memoryview(b" two")], [b"three"], []):
        store.put("a", parts)
        assert opened(tmp_path).get("a") == b"".join(parts)
    store.put("b", [b"other"])
    assert sorted(store) == ["a", "b"]
    store.remove("a")
    assert "a" not in store
    assert store.get("b") == b"other"


def test_only_the_user_can_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        opened(tmp_path).put("a", [b"secret"])
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "a.entry").stat().st_mode & 0o777 == 0o600


def test_damaged_files_and_those_of_other_keys_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    store.put("other", [b"contents"])
    path = tmp_path / "cache" / "a.entry"
    store.put("a", [b"contents"])
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    other = (tmp_path / "cache" / "other.entry").read_bytes()
    for contents in (b"", whole[:30], whole[:-1], whole + b"!", flipped, other):
        path.write_bytes(contents)
        assert store.get("a") is None
        assert not path.exists()
    assert caplog.messages == [f"{path} was damaged, and is made again"] * 6
    assert store.get("other") == b"contents"


def a_link(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "within").write_text("x")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.timeout(20)  # a pipe must not be waited for
@pytest.mark.parametrize("spoil", [a_link, a_folder, a_pipe, open_to_all])
def test_what_is_no_file_of_the_user_is_removed(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    store = opened(tmp_path)
    store.put("a", [b"contents"])
    path = tmp_path / "cache" / "a.entry"
    spoil(path)
    assert "a" in store
    assert store.get("a") is None
    assert "a" not in store
    store.put("a", [b"contents"])
    assert store.get("a") == b"contents"
    if spoil is a_link:  # whose target stays
        assert (tmp_path / "elsewhere").exists()


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = opened(tmp_path)
    store.put("a", [b"first"])
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.put("a", [b"second"])
    assert store.get("a") == b"first"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_files_used_least_recently_are_removed_and_others_left_alone(tmp_path: Path) -> None:
    store = opened(tmp_path, size=5000)
    folder = tmp_path / "cache"
    (folder / "notes.txt").write_bytes(bytes(10_000))
    (folder / ".killed.entry").write_bytes(bytes(1000))  # left by a killed writer
    os.utime(folder / ".killed.entry", (1, 1))
    for key in "abcd":
        store.put(key, [bytes(1000)])
    store.mark_used(["b", "a"])
    assert store.get("c") is not None
    store.put("e", [bytes(1000)])
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.entry", "b.entry", "c.entry", "e.entry", "notes.txt",
    ]  # fmt: skip
    for key in "fg":
        store.put(key, [bytes(1000)])
    assert sorted(store) == ["c", "e", "f", "g"]


def test_writers_and_readers_of_a_key_never_see_a_part(tmp_path: Path) -> None:
    stores = [opened(tmp_path) for _ in range(4)]
    seen = []

    def work(store: Store) -> None:
        for i in range(50):
            store.put("a", [bytes([i]) * 5000])
            contents = store.get("a")
            seen.append(contents is not None and len(set(contents)) == 1)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 200


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UnsafeFolderError):
        opened(tmp_path)


def test_nothing_is_kept_by_default_if_that_is_off_or_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store("kind", ".entry", size=SIZE) is not None
    monkeypatch.setenv(ENVIRONMENT, "off")
    assert default_store("kind", ".entry", size=SIZE) is None
    monkeypatch.delenv(ENVIRONMENT)
    (tmp_path / "dflash_jax" / "kind").chmod(0o777)
    assert default_store("kind", ".entry", size=SIZE) is None
