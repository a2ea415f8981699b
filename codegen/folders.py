"""Folders that code is loaded from, and who may write to them."""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codegen import KernelError

_held: set[int] = set()  # descriptors of lock files


def cache_dir() -> Path:
    """Folder of the kernel cache and the private toolchain. It may not exist yet."""
    given = os.environ.get("DUALKV_CACHE_DIR")
    if given:
        return Path(given).absolute()
    caches, home = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    if not caches and not home:
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:  # a container run as a user that its image does not know
            return Path(tempfile.gettempdir()).absolute() / f"dualkv-{os.geteuid()}"
    return Path(caches or f"{home}/.cache").absolute() / "dualkv"


def make_cache_dir() -> Path:
    """The cache folder, created if it does not exist.

    Raises:
        OSError: the folder cannot be created.
        KernelError: the folder is not safe to load code from.
    """
    folder = cache_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    return folder


def check_private(folder: Path, what: str = "the kernel cache", owners: tuple[int, ...] = ()) -> None:
    """Raise KernelError unless `folder`, from which code is loaded, belongs to this user (or `owners`) and nobody else
    can write to it."""
    info = folder.stat()
    if info.st_uid not in (owners or (os.geteuid(),)):
        raise KernelError(
            f"{what} {folder} belongs to uid {info.st_uid}, this process runs as {os.geteuid()}: code is not loaded "
            "from another user's folder; use a folder of yours"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelError(
            f"{what} {folder} can be written by others (mode {stat.S_IMODE(info.st_mode):o}): code is not loaded from "
            f"there; chmod go-w {folder}"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`: one thread of one process at a time. A process that dies releases the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has it open too
    finally:
        _held.discard(file)
        os.close(file)


def _in_forked_child() -> None:
    """Release the locks of the parent's other threads, which do not exist in the child."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_in_forked_child)
