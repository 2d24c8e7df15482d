"""Prefix folders hold prompts: only the user can read them, and nobody else can change them."""

import os
import stat
from pathlib import Path

import pytest

from dflash_jax.engine.prefix.disk import PrefixDisk
from dflash_jax.errors import PlanError
from tests.engine.test_prefix_damage import IDS, SMALL, found, segments, small
from tests.engine.test_prefix_disk import path_of

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners of files")


def filled(folder: Path) -> PrefixDisk:
    one = small(folder)
    one.keep(IDS, segments())
    one.flush()
    assert sorted(found(one)) == [0, SMALL, 2 * SMALL]
    return one


@pytest.mark.parametrize("umask", [0, 0o22])
def test_only_the_user_can_read_what_is_written(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    before = os.umask(umask)
    try:
        filled(folder)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode): path.is_dir() for path in folder.rglob("*")}
    assert modes == {0o700: True, 0o600: False}


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_entries_that_all_could_change_are_refused(tmp_path: Path, mode: int) -> None:
    home = filled(tmp_path / "folder")._store.folder
    home.chmod(mode)
    with pytest.raises(PlanError, match=r"prefix_folder .* another user could change .*chmod go-w"):
        small(tmp_path / "folder")


def test_a_folder_like_tmp_may_be_shared_with_other_users(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    home = filled(shared)._store.folder
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        os.chown(home, 65534, 65534)
        with pytest.raises(PlanError, match="belongs to user 65534; expected 0 or root"):
            small(shared)


def test_a_file_that_another_could_change_is_not_read(tmp_path: Path) -> None:
    one = filled(tmp_path / "folder")
    path_of(one, IDS[:SMALL]).chmod(0o666)
    again = small(tmp_path / "folder")
    assert found(again) == {}
    assert again.counters.spoiled == 1
