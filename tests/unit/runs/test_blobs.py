"""Blobs: content in, the same content out, stored once, and damage is found when asked."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import RunError
from rookery.runs import BlobStore, Run, disk

names = st.lists(
    st.text("abcü .", min_size=1, max_size=4).filter(lambda n: n.strip(".")), min_size=1, max_size=3
)
trees = st.dictionaries(names.map(lambda parts: "/".join(parts)), st.binary(max_size=50))


def make_store(folder: Path) -> BlobStore:
    (folder / "blobs").mkdir()
    return BlobStore(folder / "blobs", scratch=folder / ".tmp", check_owner=lambda: None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    store = make_store(tmp_path)
    yield store
    assert not list((tmp_path / ".tmp").glob("*")), "something half-written was left behind"


def write_tree(folder: Path, tree: dict[str, bytes]) -> bool:
    """False when the names clash: one is both a file and a folder."""
    folder.mkdir()
    try:
        for name, data in tree.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    except OSError:
        return False
    return True


def read_tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@given(st.lists(st.binary(max_size=100)))
def test_bytes_come_back_and_equal_ones_are_one(contents: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        store = make_store(Path(folder))
        digests = [store.put_bytes(data) for data in contents]
        assert [store.read_bytes(digest, verify=True) for digest in digests] == contents
        assert len(store.digests()) == len(set(contents))


@given(first=trees, second=trees)
def test_folders_have_one_digest_per_content(
    first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        store = make_store(root)
        if not (first and second):
            return
        if not (write_tree(root / "a", first) and write_tree(root / "b", second)):
            return
        digests = store.put_folder(root / "a"), store.put_folder(root / "b")
        assert (digests[0] == digests[1]) == (first == second)
        assert read_tree(store.path(digests[0], verify=True)) == first
        assert read_tree(store.path(digests[1], verify=True)) == second
        assert read_tree(root / "a") == first, "the original was changed"


def test_a_staged_folder_is_moved_not_copied(store: BlobStore, tmp_path: Path) -> None:
    with store.stage() as folder:
        (folder / "adapter.safetensors").write_bytes(b"weights")
        inode = (folder / "adapter.safetensors").stat().st_ino
        digest = store.put_folder(folder)
    assert (store.path(digest) / "adapter.safetensors").stat().st_ino == inode
    write_tree(tmp_path / "copy", {"adapter.safetensors": b"weights"})
    assert store.put_folder(tmp_path / "copy") == digest
    assert store.digests() == [digest]


def test_a_stage_that_fails_leaves_nothing(store: BlobStore) -> None:
    with pytest.raises(ValueError, match="mine"), store.stage() as folder:
        (folder / "x").write_bytes(b"x")
        raise ValueError("mine")
    assert store.digests() == []


@pytest.mark.parametrize("change", ["flip", "rename", "add", "cut"])
def test_damage_is_found_when_asked(store: BlobStore, tmp_path: Path, change: str) -> None:
    write_tree(tmp_path / "a", {"x": b"12345", "y/z": b""})
    digest = store.put_folder(tmp_path / "a")
    path = store.path(digest, verify=True)
    if change == "flip":
        (path / "x").write_bytes(b"12346")
    elif change == "rename":
        (path / "x").rename(path / "x2")
    elif change == "add":
        (path / "y" / "new").write_bytes(b"")
    else:
        os.truncate(path / "x", 4)
    assert store.path(digest) == path
    with pytest.raises(RunError, match=f"{digest} is damaged.*Restore it from a copy"):
        store.path(digest, verify=True)


def test_removed_blobs_are_gone_and_can_come_back(store: BlobStore, tmp_path: Path) -> None:
    write_tree(tmp_path / "a", {"x": b"1"})
    digests = [store.put_folder(tmp_path / "a"), store.put_bytes(b"2")]
    for digest in digests:
        store.remove(digest)
        with pytest.raises(RunError, match="holds no blob"):
            store.path(digest)
    assert store.digests() == []
    assert [store.put_folder(tmp_path / "a"), store.put_bytes(b"2")] == digests


def test_linked_files_are_copied(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"data")
    write_tree(tmp_path / "a", {"y": b""})
    (tmp_path / "a" / "x").symlink_to(tmp_path / "target")
    path = store.path(store.put_folder(tmp_path / "a"))
    assert not (path / "x").is_symlink()
    assert (path / "x").read_bytes() == b"data"


def test_what_cannot_be_a_blob_is_refused(store: BlobStore, tmp_path: Path) -> None:
    for name in ("empty", "pipe", "dangling", "loop"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "p")
    (tmp_path / "dangling" / "d").symlink_to("nowhere")
    (tmp_path / "loop" / "l").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_bytes(b"")
    expected = {
        "empty": "holds no files",
        "pipe": "not a regular file",
        "dangling": "links to nothing",
        "loop": "links to a folder",
        "file": "use put_bytes",
        "missing": "not a folder",
    }
    for name, words in expected.items():
        with pytest.raises(RunError, match=words):
            store.put_folder(tmp_path / name)
    with pytest.raises(RunError, match="is a link"), store.stage() as folder:
        (folder / "l").symlink_to(tmp_path / "file")
        store.put_folder(folder)
    assert store.digests() == []


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_bad_digests_are_refused(store: BlobStore, digest: str) -> None:
    with pytest.raises(RunError, match="64 hexadecimal digits"):
        store.path(digest)


def test_reading_a_folder_as_bytes_says_how(store: BlobStore, tmp_path: Path) -> None:
    write_tree(tmp_path / "a", {"x": b"1"})
    with pytest.raises(RunError, match="is a folder: use path"):
        store.read_bytes(store.put_folder(tmp_path / "a"))


def test_threads_may_put_the_same_at_once(store: BlobStore, tmp_path: Path) -> None:
    write_tree(tmp_path / "a", {"x": b"1" * 5000, "y": b"2"})
    found: list[str] = []

    def work() -> None:
        for _ in range(10):
            found.append(store.put_folder(tmp_path / "a"))
            found.append(store.put_bytes(b"z"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert sorted(set(found)) == store.digests()
    assert [store.path(digest, verify=True).name for digest in store.digests()]


def test_prune_keeps_what_is_named(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="grpo", name="poet", config={}) as run:
        rollouts = [run.blobs.put_bytes(b"rollouts %d" % step) for step in range(5)]
        with run.blobs.stage() as folder:
            (folder / "weights").write_bytes(b"w")
            checkpoint = run.blobs.put_folder(folder)
        with pytest.raises(RunError, match="holds no blob"):
            run.blobs.prune(keep=[checkpoint, "0" * 64])
        assert len(run.blobs.digests()) == 6, "a misspelt name deletes nothing"
        assert run.blobs.prune(keep=[checkpoint, *rollouts[3:]]) == 3
        assert run.blobs.digests() == sorted([checkpoint, *rollouts[3:]])
        assert run.blobs.read_bytes(rollouts[4], verify=True) == b"rollouts 4"
        assert run.blobs.prune(keep=run.blobs.digests()) == 0
        assert not list((run.path / ".tmp").iterdir())


# Folders are replaced whole.


def make(root: Path) -> Run:
    return Run.create(root, kind="evolve", name="poet", config={})


def fill(text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        for name in ("a", "sub/b"):
            (folder / name).write_text(text)

    return write


def read(folder: Path) -> str:
    texts = {(folder / name).read_text() for name in ("a", "sub/b")}
    assert len(texts) == 1
    return texts.pop()


def test_a_folder_is_never_absent(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        best = run.write_folder("best", fill("0"))
        probe, other = tmp_path / "probe", tmp_path / "other"
        probe.mkdir()
        other.mkdir()
        if not disk.exchange(probe, other):
            pytest.skip("the file system cannot exchange folders")
        has_ended = threading.Event()
        missing: list[int] = []
        looks = 0

        def look() -> None:
            nonlocal looks
            while not has_ended.is_set():
                looks += 1
                if not best.exists():
                    missing.append(looks)

        thread = threading.Thread(target=look)
        thread.start()
        for i in range(1, 60):
            run.write_folder("best", fill(str(i)))
        has_ended.set()
        thread.join()
        assert looks > 100 and not missing
        assert read(best) == "59"
        assert not list((run.path / ".tmp").iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("ways")
def test_folders_nest(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        for step in (10, 20, 10):
            path = run.write_folder(f"checkpoints/checkpoint_{step}", fill(str(step)))
            assert path == run.path / "checkpoints" / f"checkpoint_{step}"
            assert read(path) == str(step)
        for name in ("checkpoints/../x", "a//b", "/a", "blobs/x", "a/.b", "a/"):
            with pytest.raises(RunError, match="folder name"):
                run.write_folder(name, fill("x"))
        names = sorted(p.name for p in (run.path / "checkpoints").iterdir())
        assert names == ["checkpoint_10", "checkpoint_20"]


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_kill_between_two_renames_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    class Killed(BaseException):
        pass

    done, rename = 0, os.rename

    def counted(source: Path, target: Path) -> None:
        nonlocal done
        if done == num_renames:
            raise Killed
        done += 1
        rename(source, target)

    run = make(tmp_path)
    run.write_folder("logs/best", fill("old"))
    monkeypatch.setattr(disk, "exchange", lambda *_: False)
    monkeypatch.setattr(disk, "sync_folder", lambda path: None)
    monkeypatch.setattr(os, "rename", counted)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    try:
        run.write_folder("logs/best", fill("new"))
    except Killed:
        assert num_renames < 2
    monkeypatch.undo()
    run.close()
    with Run.open(run.path) as run:
        assert read(run.path / "logs/best") == ("new" if num_renames == 2 else "old")
        assert not list((run.path / ".old").glob("*"))


def test_what_the_system_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError) as failed:
        disk.exchange(tmp_path / "none", tmp_path)
    assert failed.value.errno == errno.ENOENT
