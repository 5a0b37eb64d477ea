"""The atomic writer: whatever happens to a build, the old bundle or none is there, and nothing of others is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder import bundle as writer
from builder.bundle import Staging, check_output, clean_stale
from runtime.bundle import open_bundle
from runtime.errors import BundleError
from runtime.manifest import FORMAT_VERSION

MakeBundle = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
NEW = {"weights.bin": b"new" * 1000, "target.b1.onnx": b"t"}

CHILD = """
    import resource, sys, time
    from pathlib import Path
    from builder.bundle import Staging

    def wait():
        print("ready", flush=True)
        time.sleep(60)

    with Staging(Path(sys.argv[1]), overwrite=True) as staging:
        {body}
"""


@pytest.fixture
def start() -> Iterator[Callable[[Path, str], subprocess.Popen[str]]]:
    """Starts a build of `out` in a process of its own that runs `body` inside the staging block."""
    running: list[subprocess.Popen[str]] = []

    def run(out: Path, body: str) -> subprocess.Popen[str]:
        code = textwrap.dedent(CHILD).format(body=body)
        pipe = subprocess.PIPE
        child = subprocess.Popen([sys.executable, "-c", code, str(out)], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        running.append(child)
        return child

    yield run
    for child in running:
        if child.poll() is None:
            child.kill()
        child.communicate()


def ready(child: subprocess.Popen[str]) -> None:
    if child.stdout is None or child.stdout.readline() != "ready\n":
        pytest.fail(f"the child died: {child.communicate()}")


def identity(path: Path) -> str:
    return open_bundle(path).manifest.identity


def beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry.name != path.name)


def test_two_builds_of_the_same_give_the_same_bytes(make_bundle: MakeBundle) -> None:
    one, two = make_bundle("one"), make_bundle("two")
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert [str(name) for name in names] == [
        "manifest.json",
        "target.b1.onnx",
        "tokenizer/tokenizer.json",
        "weights.bin",
    ]
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_permissions_follow_the_umask(make_bundle: MakeBundle) -> None:
    mask = os.umask(0)
    os.umask(mask)
    path = make_bundle()
    assert path.stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize("exchange", [True, False])
def test_replaced_only_with_overwrite(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(writer, "_renameat2", lambda *_: False)
    path = make_bundle()
    before = identity(path)
    with pytest.raises(
        BundleError, match=r"bundle: the output exists; expected nothing; found a bundle\. Pass --overwrite"
    ):
        make_bundle(files=NEW)
    assert identity(path) == before
    make_bundle(files=NEW, overwrite=True)
    assert identity(path) != before
    assert (path / "weights.bin").read_bytes() == NEW["weights.bin"]
    assert beside(path) == []


def test_a_bundle_of_another_version_can_be_replaced(make_bundle: MakeBundle) -> None:
    path = make_bundle(format=0)
    make_bundle(overwrite=True)
    assert open_bundle(path).manifest.format == FORMAT_VERSION


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        {},
        {"notes.txt": "mine"},
        {"manifest.json": '{"name": "an extension", "manifest_version": 3}'},
        {"manifest.json": '{"format": 1, "producer": "another tool", "files": {}}'},
        {"manifest.json": "{"},
    ],
)
def test_a_directory_that_is_no_bundle_is_never_replaced(
    tmp_path: Path, content: dict[str, str], overwrite: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, text in content.items():
        (out / name).write_text(text)
    with (
        pytest.raises(BundleError, match=r"the output exists and is not a bundle; .* found a directory without"),
        Staging(out, overwrite=overwrite),
    ):
        pytest.fail("entered")
    assert {path.name: path.read_text() for path in out.iterdir()} == content
    assert beside(out) == []


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BundleError, match=r"is not a bundle; .* found a file\. Choose another --out"):
        check_output(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text() == "mine"


def refused(out: Path, expected: str) -> None:
    with pytest.raises(BundleError) as caught:
        check_output(out, overwrite=True)
    assert expected in str(caught.value)


def test_places_that_cannot_be_written(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_bundle()
    (tmp_path / "f1").write_text("mine")
    expected = f"can't be written; expected a directory to write into; found {tmp_path / 'f1'}, which is none. Choose"
    refused(tmp_path / "f1/sub", expected)
    refused(tmp_path / "f1/sub/deeper", expected)
    refused(Path("/dev/full/x"), "found /dev/full, which is none")
    refused(tmp_path / "new" / ("n" * 300), "the name is too long; expected at most 255 bytes; found 300. Choose")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    refused(
        tmp_path / "link", "is not a bundle; expected nothing, or a bundle; found a symbolic link that leads nowhere"
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    for out in (path, tmp_path / "new/out"):
        refused(out, f"can't be written; expected a directory to write into; found no right to write to {tmp_path}.")


@pytest.mark.parametrize("exchange", [True, False])
def test_a_long_name(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(writer, "_renameat2", lambda *_: False)
    path = make_bundle("n" * 250)
    make_bundle("n" * 250, files=NEW, overwrite=True)
    assert open_bundle(path).path == path
    assert beside(path) == []
    assert writer._hidden(path, "old") != writer._hidden(path.with_name("n" * 251), "old")


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer/notes.txt"])
def test_a_bundle_with_someone_elses_file_is_kept(make_bundle: MakeBundle, name: str) -> None:
    path = make_bundle()
    (path / name).write_text("mine")
    with pytest.raises(BundleError, match=f"holds more than its bundle; .* found '{name}'. Move it away"):
        make_bundle(files=NEW, overwrite=True)
    assert (path / name).read_text() == "mine"


def test_what_appears_during_the_build_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Staging(out, overwrite=True) as staging:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        with pytest.raises(BundleError, match="not a bundle"):
            staging.commit()
    assert (out / "notes.txt").read_text() == "mine"
    assert beside(out) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError()]
)
@pytest.mark.parametrize("existing", [True, False])
def test_a_failed_build_leaves_the_old_bundle_or_none(
    make_bundle: MakeBundle, tmp_path: Path, error: BaseException, existing: bool
) -> None:
    before = identity(make_bundle()) if existing else None
    path = tmp_path / "bundle"

    def fail() -> None:
        with Staging(path, overwrite=True) as staging:
            (staging.directory / "weights.bin").write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.exists() == existing
    if existing:
        assert identity(path) == before
    assert beside(path) == []


def test_disk_full_while_syncing(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle()
    before = identity(path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            make_bundle(files=NEW, overwrite=True)
    assert identity(path) == before
    assert beside(path) == []


def test_file_size_limit(make_bundle: MakeBundle, start: Callable[[Path, str], subprocess.Popen[str]]) -> None:
    path = make_bundle()
    before = identity(path)
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    child = start(path, f"{limit}; (staging.directory / 'weights.bin').write_bytes(bytes(5000)); staging.commit()")
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "File too large" in stderr
    assert identity(path) == before
    assert beside(path) == []


@pytest.mark.parametrize("existing", [True, False])
def test_killed(
    make_bundle: MakeBundle, tmp_path: Path, start: Callable[[Path, str], subprocess.Popen[str]], existing: bool
) -> None:
    before = identity(make_bundle()) if existing else None
    path = tmp_path / "bundle"
    child = start(path, "(staging.directory / 'weights.bin').write_bytes(b'half'); wait()")
    ready(child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert path.exists() == existing
    if existing:
        assert identity(path) == before
    assert len(beside(path)) == 1
    assert beside(path)[0].startswith(".bundle.partial-")
    make_bundle(files=NEW, overwrite=True)
    assert identity(path) != before
    assert beside(path) == []


def test_a_living_build_is_left_alone(
    make_bundle: MakeBundle, tmp_path: Path, start: Callable[[Path, str], subprocess.Popen[str]]
) -> None:
    path = tmp_path / "bundle"
    child = start(path, "(staging.directory / 'weights.bin').write_bytes(b'half'); wait()")
    ready(child)
    make_bundle()
    (left,) = beside(path)
    assert (tmp_path / left / "weights.bin").read_bytes() == b"half"
    assert (tmp_path / left / ".owner").read_text() == f"{child.pid}\n"
    child.kill()
    child.wait()
    clean_stale(path)
    assert beside(path) == []
    assert open_bundle(path).path == path


def test_killed_before_it_took_ownership(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    partial = tmp_path / ".bundle.partial-0123456789ab"
    partial.mkdir()
    clean_stale(path)
    assert partial.exists()  # it may be a build's first instant
    os.utime(partial, (0, 0))
    clean_stale(path)
    assert not partial.exists()


def test_a_pid_serves_where_locks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_bundle: MakeBundle
) -> None:
    path = make_bundle()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name, pid in (("a" * 12, os.getpid()), ("b" * 12, dead.pid)):
        (tmp_path / f".bundle.partial-{name}").mkdir()
        (tmp_path / f".bundle.partial-{name}/.owner").write_text(f"{pid}\n")

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    clean_stale(path)
    assert beside(path) == [f".bundle.partial-{'a' * 12}"]


def test_a_swap_cut_short_is_finished(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    before = identity(path)
    path.rename(tmp_path / ".bundle.old-0123456789ab")
    with pytest.raises(BundleError, match="found a bundle"), Staging(path, overwrite=False):
        pytest.fail("entered")
    assert identity(path) == before
    (tmp_path / ".bundle.old-0123456789ab").mkdir()
    clean_stale(path)
    assert beside(path) == []


def test_a_failed_second_rename_brings_the_old_bundle_back(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_bundle()
    before = identity(path)
    rename = os.rename

    def second_fails(source: Path, destination: Path) -> None:
        if ".partial-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, destination)

    monkeypatch.setattr(writer, "_renameat2", lambda *_: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output"):
        make_bundle(files=NEW, overwrite=True)
    assert identity(path) == before
    assert beside(path) == []


def test_the_exchange_leaves_no_moment_without_a_bundle(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    if not writer._renameat2(one, two, writer._RENAME_EXCHANGE):
        pytest.skip("this file system has no exchange")
    path = make_bundle()

    def refuse(source: Path, destination: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "rename", refuse)
    make_bundle(files=NEW, overwrite=True)
    assert (path / "weights.bin").read_bytes() == NEW["weights.bin"]


KILL_AT = """
    import os, shutil, signal, sys
    from pathlib import Path
    from tests.examples import example_manifest
    from builder import bundle as writer

    def dying(function, when, at):
        def call(*arguments, **options):
            global count
            count += 1
            if count == at and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **options)
            if count == at and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call

    count = 0
    out, module, name, when, at, exchange = sys.argv[1:]
    if exchange == "no":
        writer._renameat2 = lambda *_: False
    owner = {"os": os, "shutil": shutil, "writer": writer}[module]
    with writer.Staging(Path(out), overwrite=True) as staging:
        (staging.directory / "weights.bin").write_bytes(b"new")
        (staging.directory / "target.b1.onnx").write_bytes(b"new")
        writer.seal(staging.directory, example_manifest())
        setattr(owner, name, dying(getattr(owner, name), when, int(at)))
        staging.commit()
"""


@pytest.mark.parametrize(
    ("function", "when", "at", "exchange", "left"),
    [
        ("os.fsync", "before", 1, "yes", "old"),
        ("os.fsync", "after", 5, "yes", "old"),
        ("writer._swap", "before", 1, "yes", "old"),
        ("writer._swap", "after", 1, "yes", "new"),
        ("shutil.rmtree", "before", 1, "yes", "new"),
        ("os.rename", "before", 1, "no", "old"),
        ("os.rename", "after", 1, "no", None),
        ("os.rename", "after", 2, "no", "new"),
        ("shutil.rmtree", "before", 1, "no", "new"),
    ],
)
def test_killed_during_the_swap(
    make_bundle: MakeBundle, function: str, when: str, at: int, exchange: str, left: str | None
) -> None:
    path = make_bundle()
    old = identity(path)
    module, _, name = function.partition(".")
    command = [sys.executable, "-c", textwrap.dedent(KILL_AT), str(path), module, name, when, str(at), exchange]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert path.exists() == (left is not None)
    # The next build starts with this; it may bring the old bundle back.
    clean_stale(path)
    assert (identity(path) == old) == (left != "new")


def test_similar_names_beside_it_are_not_touched(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    mine = [tmp_path / ".bundle.partial-notes", tmp_path / ".bundle2.partial-0123456789ab", tmp_path / "bundle.old-1"]
    for folder in mine:
        folder.mkdir()
        os.utime(folder, (0, 0))
    clean_stale(path)
    assert all(folder.exists() for folder in mine)


def test_through_a_link_and_into_new_folders(make_bundle: MakeBundle, tmp_path: Path) -> None:
    make_bundle("deep/er/bundle")
    (tmp_path / "link").symlink_to(tmp_path / "deep/er/bundle")
    make_bundle("link", files=NEW, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep/er/bundle/weights.bin").read_bytes() == NEW["weights.bin"]
