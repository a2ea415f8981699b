"""Folders that code is loaded from, and who may write to them.

What this package writes and reads later gets its mode here, whatever the umask. Under umask 002, the default of
accounts on Ubuntu, files and folders would be open to the group, and code is not loaded from there.
"""

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

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
SHARED, PRIVATE, FILE = 0o755, 0o700, 0o644  # modes of folders that other users may read, of others, and of files

_held: set[int] = set()  # descriptors of lock files


def of_environment(variable: str) -> Path | None:
    """The absolute path that an environment variable has, None if it is not set. `~` is a user's home: a shell expands
    it in some places, a container's settings in none.

    Raises:
        KernelError: a home that is not known.
    """
    given = os.environ.get(variable)
    if not given:
        return None
    found = os.path.expanduser(given)
    if found.startswith("~"):
        raise KernelError(f"{variable} is {given!r}, whose home is not known, expected a path without ~")
    return Path(found).absolute()


def cache_dir() -> Path:
    """Folder of the kernel cache and the private toolchain. It may not exist yet."""
    given = of_environment("DUALKV_CACHE_DIR")
    if given:
        return given
    caches, home = of_environment("XDG_CACHE_HOME"), os.environ.get("HOME")
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
    make_folder(folder, PRIVATE)
    check_private(folder)
    return folder


def make_folder(folder: Path, mode: int) -> None:
    """Create `folder`, and the parents that it lacks, with this mode. A folder that exists keeps its mode.

    Raises:
        OSError: the folder cannot be created.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent, mode)
    folder.mkdir(mode, exist_ok=True)  # another process may make it now
    set_mode(folder, mode)


def set_mode(path: Path, mode: int) -> None:
    """Set a file's or folder's permissions; other bits, such as the set-group-ID of a shared folder, stay."""
    now = stat.S_IMODE(path.stat().st_mode)
    if now & 0o777 != mode:
        path.chmod(now & ~0o777 | mode)


def close_to_others(tree: Path) -> None:
    """Take from all but the owner the right to write to a folder and to all in it. Symbolic links are left alone."""
    for folder, _, files in os.walk(tree):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            now = stat.S_IMODE(path.lstat().st_mode)
            if not path.is_symlink() and now & OTHERS_WRITE:
                path.chmod(now & ~OTHERS_WRITE)


def check_private(folder: Path, what: str = "the kernel cache", owners: tuple[int, ...] = ()) -> None:
    """Raise KernelError unless `folder`, from which code is loaded, belongs to this user (or `owners`) and nobody else
    can write to it."""
    info = folder.stat()
    if info.st_uid not in (owners or (os.geteuid(),)):
        raise KernelError(
            f"{what} {folder} belongs to uid {info.st_uid}, this process runs as {os.geteuid()}: code is not loaded "
            "from another user's folder; use a folder of yours"
        )
    if said := open_to_others(folder):
        raise KernelError(f"{what} {folder} {said}")


def open_to_others(path: Path) -> str | None:
    """Say why code is not loaded from a file or folder that others than its owner can write to; None if they cannot.

    Raises:
        OSError: there is none.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & OTHERS_WRITE:
        return None
    return f"can be written by others (mode {mode:o}): code is not loaded from there; chmod go-w {path}"


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
