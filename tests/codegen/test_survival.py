"""The store survives processes at once and killed ones, damaged files, disks that refuse, no HOME, forks.

Compiles are stand-ins (tests/codegen/stand_in.py); the processes, signals, locks, forks and file systems are real.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from codegen import KernelError, compile, folders, store
from codegen.spec import KernelSpec, forward_spec
from tests.codegen import stand_in

ROOT = Path(__file__).parents[2]
SPEC = forward_spec("bf16", 128, 4)
SETUP = """
import os, signal, sys, threading, time
from pathlib import Path
from codegen import store
from codegen.spec import forward_spec
from tests.codegen import stand_in
stand_in.install()
SPEC = forward_spec("bf16", 128, 4)
"""


def start(program: str, **environment: str) -> subprocess.Popen:
    """A process that runs SETUP and `program`."""
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + program],
        cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out


def left_over() -> list[str]:
    """Folders in the cache that are no entries."""
    return [p.name for p in store.cache_dir().iterdir() if p.is_dir() and p.name.startswith(".")]


def wait_for(happened, seconds=900.0):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_fork_after_import_and_after_use(compiles, monkeypatch):
    """Children use what the parent has, and add to the same cache."""
    said = output(
        start(
            """
store.open_entry = lambda path, spec: path.name
mine = store.load(SPEC)
child = os.fork()
if child == 0:
    assert store.load(SPEC) is mine
    store.load(forward_spec("fp16", 128, 4))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.load(forward_spec("fp16", 128, 4))
print(len(stand_in.compiles()), dict(store.counts))
""",
            STAND_IN_SECONDS="0",
        )
    )
    assert said.strip() == "2 {'compiled': 1, 'cache': 1}"


# ---------------------------------------------------------------- processes
def test_eight_processes_ask_at_once_and_one_compiles(compiles, tmp_path):
    program = """
print("ready", flush=True)
sys.stdin.readline()
print(store.entry(SPEC), dict(store.counts))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SETUP + program],
            cwd=ROOT, env=os.environ | {"STAND_IN_SECONDS": "0.5"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(8)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [output(process).split(maxsplit=1) for process in processes]
    assert {path for path, _ in said} == {str(store.entry(SPEC))}
    assert sorted(counts.strip() for _, counts in said) == ["{'cache': 1}"] * 7 + ["{'compiled': 1}"]
    assert compiles() == [SPEC]


KILLED = """
def asks_until_killed(at):
    "Child: ask for the kernel; die at the at-th thing that is done to files. Parent: whether it came to that."
    child = os.fork()
    if child == 0:
        seen = [0]
        def hook(event, arguments):
            if event in ("open", "fcntl.flock") or event.startswith(("os.", "shutil.")):
                seen[0] += 1
                if seen[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        store.entry(SPEC)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def damage():
    stand_in.flipped(store.entry(SPEC) / "kernel.so", 0)

at, healed = 0, 0
while True:
    at += 1
    if WITH_DAMAGE:
        damage()
    killed = asks_until_killed(at)
    before = len(stand_in.compiles())
    assert store.where(SPEC) in (None, "cache")
    path = store.entry(SPEC)
    assert store.mismatch(path, SPEC, same_compiler=True) is None
    assert len(stand_in.compiles()) - before <= 1
    healed += len(stand_in.compiles()) - before
    folders = [p.name for p in store.cache_dir().iterdir() if p.is_dir()]
    if len(stand_in.compiles()) - before:  # who compiles tidies up
        assert folders == [path.name], folders
        assert sorted(p.name for p in path.iterdir()) == ["kernel.cubin", "kernel.json", "kernel.ptx", "kernel.so"]
    if not killed:
        break
    for p in store.cache_dir().iterdir():
        if not WITH_DAMAGE and p.name == path.name:
            for file in p.iterdir():
                file.unlink()
            p.rmdir()
print(at, healed)
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_killed_at_any_moment(compiles, damaged):
    """A process is killed at every access to the file system, of a first store and of one that replaces a damaged
    entry."""
    said = output(start(f"WITH_DAMAGE = {damaged}\n" + KILLED, STAND_IN_SECONDS="0"))
    moments, healed = map(int, said.split())
    assert moments > 15
    assert healed > 8


def test_killed_while_others_wait(compiles):
    """The lock goes with the process; one of the waiting processes compiles, and what the dead one began is removed."""
    first = start("store.entry(SPEC)", STAND_IN_SECONDS="900")
    wait_for(lambda: store.cache_dir().is_dir() and left_over())
    others = [start("print(store.entry(SPEC))", STAND_IN_SECONDS="0.2") for _ in range(2)]
    time.sleep(0.3)
    assert all(other.poll() is None for other in others)
    first.kill()
    first.communicate()
    assert len({output(other) for other in others}) == 1
    assert compiles() == [SPEC]
    assert left_over() == []


def test_fork_while_another_thread_compiles(compiles):
    """The child finds the lock of the parent's thread free, and compiles for itself."""
    said = output(
        start(
            """
store.open_entry = lambda path, spec: path.name
slow = threading.Thread(target=store.load, args=(SPEC,))
slow.start()
while not any(p.is_dir() for p in store.cache_dir().glob(".*")):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    store.load(forward_spec("fp16", 128, 4))
    os._exit(0)
end = time.monotonic() + 900
while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < end:
    time.sleep(0.01)
if not ended:
    os.kill(child, signal.SIGKILL)
slow.join()
print(bool(ended), len(stand_in.compiles()))
""",
            STAND_IN_SECONDS="0.5",
        )
    )
    assert said == "True 2\n"


def test_a_child_that_lives_on_holds_no_lock(compiles):
    """The child is forked while its parent compiles. The parent is killed, the child lives, and a third process is not
    kept out."""
    first = start(
        """
thread = threading.Thread(target=store.entry, args=(SPEC,), daemon=True)
thread.start()
while not any(p.is_dir() for p in store.cache_dir().glob(".*")):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    time.sleep(900)
    os._exit(0)
print(child, flush=True)
time.sleep(900)
""",
        STAND_IN_SECONDS="900",
    )
    child = int(first.stdout.readline())
    try:
        first.kill()
        begin = time.monotonic()
        output(start("store.entry(SPEC)", STAND_IN_SECONDS="0"))
        assert time.monotonic() - begin < 600
        os.kill(child, 0)  # it still lives
    finally:
        os.kill(child, signal.SIGKILL)
        first.communicate()


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_of_a_record_never_passes_for_another_kernel(compiles):
    """A flipped bit is a miss, or it leaves unchanged what decides about loading."""
    path = store.entry(SPEC) / "kernel.json"
    good = path.read_bytes()
    decide = ("schema", "spec", "compiler", "sources", "so_sha256")
    was, hits = json.loads(good), 0
    for at in range(0, len(good), 3):
        path.write_bytes(good)
        stand_in.flipped(path, at)
        if store.where(SPEC) is not None:
            hits += 1
            now = json.loads(path.read_bytes())
            assert all(now[name] == was[name] for name in decide), at
    assert 0 < hits < len(good) // 6


# ---------------------------------------------------------------- disks
def test_a_full_disk(compiles, monkeypatch, tmp_path, caplog):
    """The kernel is made in a temporary folder; the cache keeps no part of it, and is used once there is room."""
    cache = str(store.cache_dir())

    def full(spec: KernelSpec, folder: Path):
        if str(folder).startswith(cache):
            (folder / "kernel.so").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return stand_in.compile_kernel(spec, folder)

    with monkeypatch.context() as patch:
        patch.setattr(compile, "compile_kernel", full)
        path = store.entry(SPEC)
        assert path.parent != store.cache_dir()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert store.entry(SPEC) == path
        store.entry(forward_spec("fp16", 128, 4))
    assert len(compiles()) == 2
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"the kernel cache {cache} cannot be written (No space left on device): kernels are compiled for this process "
        "alone; set DUALKV_CACHE_DIR to keep them"
    ]
    assert left_over() == []
    assert store.where(SPEC) is None
    assert store.entry(SPEC).parent == store.cache_dir()


def test_a_full_disk_under_the_compiler_is_told_from_its_other_failures(monkeypatch, tmp_path):
    def worker(text):
        done = subprocess.CompletedProcess([], 1, stdout="", stderr=text)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    worker("/usr/bin/ld: final link failed: No space left on device\n")
    with pytest.raises(OSError, match="No space left on device") as caught:
        compile.compile_kernel(SPEC, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    worker("DSLRuntimeError: out of registers")
    with pytest.raises(KernelError, match="failed: DSLRuntimeError: out of registers"):
        compile.compile_kernel(SPEC, tmp_path)


def test_a_cache_that_cannot_be_made(compiles, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DUALKV_CACHE_DIR", "/proc/dualkv")
    path = store.entry(SPEC)
    assert path.parent != store.cache_dir()
    assert "the kernel cache /proc/dualkv cannot be written" in caplog.text
    with pytest.raises(KernelError, match="kernels cannot be written to /proc/dualkv"):
        store.add(SPEC, Path("/proc/dualkv"))


def test_nowhere_to_write(compiles, monkeypatch, tmp_path):
    monkeypatch.setenv("DUALKV_CACHE_DIR", "/proc/dualkv")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    store._temporary_folder.cache_clear()
    with pytest.raises(KernelError, match=r"/proc/dualkv cannot be written .*, nor can /proc .*: set DUALKV_CACHE_DIR"):
        store.entry(SPEC)


def test_a_temporary_folder_goes_with_its_process(compiles, monkeypatch):
    """The folder goes with the process that made it, not with a child of it."""
    monkeypatch.setenv("DUALKV_CACHE_DIR", "/proc/dualkv")
    program = """
path = store.entry(SPEC)
if os.fork() == 0:
    sys.exit()
os.wait()
print(path, path.is_dir())
"""
    path, there = output(start(program)).split()
    assert there == "True"
    assert not Path(path).parent.exists()


# ---------------------------------------------------------------- no HOME
def test_without_home(compiles, monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CACHE_HOME", "DUALKV_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert store.cache_dir() == Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache" / "dualkv"
    monkeypatch.setenv("HOME", "")
    assert store.cache_dir() == Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache" / "dualkv"

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert store.cache_dir() == tmp_path / f"dualkv-{os.geteuid()}"
    path = store.entry(SPEC)
    assert path.parent == store.cache_dir()
    assert store.cache_dir().stat().st_mode & 0o777 == 0o700
    store.cache_dir().chmod(0o777)  # as it would be had another user made it first
    with pytest.raises(KernelError, match="can be written by others"):
        store.entry(SPEC)


@pytest.mark.parametrize("variable", ["DUALKV_CACHE_DIR", "DUALKV_KERNEL_DIR", "XDG_CACHE_HOME"])
def test_a_home_in_a_path_is_the_users(variable, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DUALKV_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "~/here")
    assert folders.of_environment(variable) == tmp_path / "here"
    if variable != "DUALKV_KERNEL_DIR":
        assert folders.cache_dir() in (tmp_path / "here", tmp_path / "here" / "dualkv")
    else:
        with pytest.raises(KernelError, match=rf"DUALKV_KERNEL_DIR is '{tmp_path}/here', expected an existing folder"):
            store.where(SPEC)
    monkeypatch.setenv(variable, "~nobody-of-this-name/here")
    with pytest.raises(KernelError, match=f"{variable} is '~nobody-of-this-name/here', whose home is not known"):
        folders.of_environment(variable)
    monkeypatch.setenv(variable, "")
    assert folders.of_environment(variable) is None
