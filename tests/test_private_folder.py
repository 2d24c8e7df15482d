"""Folders of caches belong to the user, and nobody else can write there."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_jax.utils import private_folder
from dflash_jax.utils.private_folder import UnsafeFolderError, cache_folder, prepare, read_file

STRANGER = 65534
pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners of files")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files to others"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files like /tmp, and no earlier answers."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(private_folder, "_said", set())
    private_folder._of_this_user.cache_clear()
    yield folder
    private_folder._of_this_user.cache_clear()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_missing_folders_are_made_for_the_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = prepare(tmp_path / "one" / "two" / "three")
    finally:
        os.umask(before)
    assert made == tmp_path / "one" / "two" / "three"
    assert {mode(made), mode(made.parent), mode(made.parents[1])} == {0o700}


@pytest.mark.parametrize("modes", [0o777, 0o1777, 0o702, 0o1703])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, modes: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(modes)
    with pytest.raises(UnsafeFolderError, match=f"others may write .*mode {modes:o}.*chmod go-w"):
        prepare(folder)
    if modes & stat.S_ISVTX:  # as in /tmp, nobody can rename a folder inside
        assert mode(prepare(folder / "own")) == 0o700
    else:
        with pytest.raises(UnsafeFolderError, match="others may write"):
            prepare(folder / "own")
        assert not (folder / "own").exists()
    folder.chmod(0o755)  # others may read: whose contents are secret hides them itself
    assert prepare(folder) == folder


def test_links_are_followed_and_checked(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "up").symlink_to("../real/.")
    assert prepare(tmp_path / "absolute" / "up" / "new") == tmp_path / "real" / "new"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "to_open").symlink_to("open")
    with pytest.raises(UnsafeFolderError, match="/open "):
        prepare(tmp_path / "to_open")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(NotADirectoryError):
        prepare(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        prepare(tmp_path / "file" / "folder")


@needs_root
def test_folders_and_files_of_another_user_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "inside").mkdir(parents=True)
    os.chown(folder, STRANGER, STRANGER)
    for place in (folder, folder / "inside", folder / "new"):
        with pytest.raises(UnsafeFolderError, match=f"belongs to user {STRANGER}; expected 0"):
            prepare(place)
    file = tmp_path / "file"
    file.write_text("text")
    assert read_file(file) == b"text"
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(UnsafeFolderError, match="file belongs to user"):
        read_file(file)


def test_the_owner_s_own_group_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o770)
    for shared in (False, True):
        monkeypatch.setattr(private_folder, "_is_shared", lambda *_, answer=shared: answer)
        if shared:
            with pytest.raises(UnsafeFolderError):
                prepare(folder)
        else:
            assert prepare(folder) == folder
    monkeypatch.undo()
    grp = pytest.importorskip("grp", reason="this system has no groups of users")
    shared_groups = [g.gr_gid for g in grp.getgrall() if g.gr_mem]
    assert all(private_folder._is_shared(os.geteuid(), gid) for gid in [*shared_groups, 2**31 - 9])


def test_another_folder_is_used_and_the_reason_said_once(tmp_path: Path, temporary: Path) -> None:
    unsafe, said = tmp_path / "unsafe", []
    unsafe.mkdir()
    unsafe.chmod(0o1777)
    found = {cache_folder(unsafe, "kernels", said.append) for _ in range(3)}
    assert found == {temporary / f"dflash_jax-{os.geteuid()}" / "kernels"}
    assert {mode(path) for path in found} == {0o700}
    [text] = said
    assert f"others may write to {unsafe}" in text
    assert f"is used instead of {unsafe}" in text
    assert list(unsafe.iterdir()) == []


@pytest.mark.parametrize("link", [False, True])
def test_a_name_that_is_taken_among_temporary_files_is_left_alone(
    tmp_path: Path, temporary: Path, link: bool
) -> None:
    taken = temporary / f"dflash_jax-{os.geteuid()}"
    if link:
        (tmp_path / "private").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "private")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    folder = cache_folder(temporary, "kernels", lambda text: None)
    assert folder.name == "kernels"
    assert folder.is_relative_to(temporary)
    assert list(taken.iterdir()) == []


@pytest.mark.timeout(20)  # a pipe must not be waited for
def test_links_pipes_folders_and_files_that_others_may_change_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "open").write_text("text")
    (tmp_path / "open").chmod(0o666)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "open", "folder", "pipe"):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            read_file(tmp_path / name)


def test_a_lock_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    folder, order = prepare(tmp_path / "cache"), []
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with private_folder.locked(folder, patience=10):
            holding.set()
            release.wait(10)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(10)
    with (
        pytest.raises(TimeoutError, match="another process has locked"),
        private_folder.locked(folder, patience=0),
    ):
        pytest.fail("the lock was held")
    release.set()
    with private_folder.locked(folder, patience=10):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    (folder / private_folder.LOCK).unlink()
    (folder / private_folder.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), private_folder.locked(folder, patience=0):
        pytest.fail("a link was followed")
    assert not (tmp_path / "elsewhere").exists()
