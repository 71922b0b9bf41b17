"""Control groups of both versions on a folder that looks like theirs."""

from pathlib import Path

import pytest

from rookery.sandbox.box import Cgroup, make_cgroup


def test_version_1_has_a_folder_per_controller(tmp_path: Path) -> None:
    group = Cgroup(tmp_path / "memory" / "x", tmp_path / "pids" / "x")
    for folder in group.folders:
        folder.mkdir(parents=True)
    (group.memory / "memory.usage_in_bytes").write_text("100\n")
    (group.memory / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 3\n")
    (group.pids / "pids.current").write_text("2\n")
    group.limit(memory_bytes=1000, max_processes=10)
    assert (group.memory / "memory.limit_in_bytes").read_text() == "1100"
    assert (group.pids / "pids.max").read_text() == "12"
    assert group.num_oom_kills() == 3


def test_version_2_has_one_folder(tmp_path: Path) -> None:
    group = Cgroup(tmp_path, tmp_path)
    (tmp_path / "memory.current").write_text("100\n")
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (tmp_path / "pids.current").write_text("2\n")
    group.limit(memory_bytes=1000, max_processes=10)
    assert (tmp_path / "memory.max").read_text() == "1100"
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert group.folders == (tmp_path,) and group.num_oom_kills() == 2


@pytest.mark.parametrize("text", ["0::/user.slice/app.scope\n", "4:memory:/a\n8:pids:/\n", ""])
def test_where_none_can_be_made_there_is_none(tmp_path: Path, text: str) -> None:
    """A plain folder has none of the kernel's files: what was made in it is removed again."""
    membership = tmp_path / "membership"
    membership.write_text(text)
    for name in ("user.slice/app.scope", "memory/a", "pids"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert make_cgroup(root=tmp_path, membership=membership) is None
    assert not list(tmp_path.rglob("rookery-*"))


def test_a_removed_group_has_killed_nobody(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert Cgroup(gone, gone).num_oom_kills() == 0
