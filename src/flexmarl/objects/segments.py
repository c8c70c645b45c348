"""Segments: files with reserved memory that hold one object each and are used again and again.

A segment file lies in `pool/` while it is free or being written, and in `objects/` under its key while it is readable;
one rename moves it, so a writer that dies half-way leaves nothing but a free segment.

Invariants (tests name them):
    * A segment is written only under an exclusive `flock` on it, and read only under a shared one. The kernel drops
      both when the process dies, so a segment is never overwritten while somebody reads it, nor lost with a reader.
    * The memory of a segment is reserved before it is mapped, so a full file system is an error, never a SIGBUS.
    * `objects/` and `pool/` change only under the folder's own lock, which is held for a few system calls, no copies.
"""

import errno
import fcntl
import mmap
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flexmarl.core.errors import StoreError
from flexmarl.objects.folder import free_bytes

LOCK_TIMEOUT_S = 60.0
LOCK_RETRY_S = 0.0005
MAX_WARM_MAPS = 4
"""Writable maps that a process keeps: a publisher alternates between two segments, and another two for its state."""
MAX_WASTE = 2
"""A free segment is used for objects of at least half its size, so that a small one never takes a large one's place."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment that this process holds exclusively."""

    fd: int
    path: Path
    view: memoryview
    """All of it, writable."""


class SegmentFolder:
    """The segments in one folder. Safe to use from several threads and processes at once."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which exists already."""
        self._folder = folder
        self._objects = folder / "objects"
        self._pool = folder / "pool"
        self._lock_path = folder / "lock"
        self._warm: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._warm_guard = threading.Lock()
        try:
            for part in (self._objects, self._pool):
                part.mkdir(mode=0o700, exist_ok=True)
            self._lock_path.touch(mode=0o600)
        except OSError as error:
            raise StoreError(f"the object folder {folder} cannot be used: {error}; was it removed?") from error

    def object_path(self, name: str) -> Path:
        """Return where the object called `name` lies when it is readable."""
        return self._objects / name

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the folder's lock.

        Raises:
            StoreError: a file operation failed, the folder is gone, or a process has kept the lock for LOCK_TIMEOUT_S.
        """
        try:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"the object folder {self._folder} cannot be used: {error}; was it removed?") from error
        try:
            deadline_s = time.monotonic() + LOCK_TIMEOUT_S
            while not _try_lock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
                if time.monotonic() > deadline_s:
                    raise StoreError(
                        f"{self._lock_path} was locked for {LOCK_TIMEOUT_S:g} s; a process of the run is stopped"
                    )
                time.sleep(LOCK_RETRY_S)
            yield
        except OSError as error:
            raise StoreError(f"the object folder {self._folder} cannot be used: {error}; was it removed?") from error
        finally:
            os.close(fd)

    @contextmanager
    def writing(self, num_bytes: int, *, what: str) -> Iterator[Segment]:
        """Hold a free segment of at least `num_bytes`; afterwards it is free again, unless `publish` has moved it.

        Raises:
            StoreError: there is no room for `what`.
        """
        fd, path = self._take(num_bytes)
        try:
            try:
                self._reserve(fd, num_bytes, what)
            except StoreError:
                path.unlink()
                raise
            yield Segment(fd=fd, path=path, view=memoryview(self._map_warm(fd)))
        finally:
            # Unlocked by hand: the warm map holds a duplicate of `fd`, so closing alone would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def publish(self, segment: Segment, name: str) -> None:
        """Make a segment readable as `name`. The caller holds the folder's lock and has looked that it is not taken."""
        os.rename(segment.path, self.object_path(name))
        fcntl.flock(segment.fd, fcntl.LOCK_UN)

    def retire(self, name: str) -> None:
        """Return an object's segment to the pool; its readers are not disturbed. Unknown names are ignored."""
        with self.locked(exclusive=True):
            try:
                os.rename(self.object_path(name), self._new_path())
            except FileNotFoundError:
                return

    def open(self, name: str) -> int | None:
        """Return a descriptor that holds a shared lock on an object's segment, or None when there is no such object."""
        with self.locked(exclusive=False):
            try:
                fd = os.open(self.object_path(name), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            if not _try_lock(fd, fcntl.LOCK_SH):
                os.close(fd)
                raise StoreError(f"{self.object_path(name)} is being written although it is readable")
            return fd

    def _new_path(self) -> Path:
        return self._pool / uuid.uuid4().hex

    def _take(self, num_bytes: int) -> tuple[int, Path]:
        """Return a locked segment: the smallest free one that fits, else a new one without memory."""
        with self.locked(exclusive=True):
            for size, path in self._free():
                if num_bytes <= size <= num_bytes * MAX_WASTE and (fd := _try_own(path)) is not None:
                    return fd, path
            path = self._new_path()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd, path

    def _free(self) -> list[tuple[int, Path]]:
        return sorted((entry.stat().st_size, Path(entry.path)) for entry in os.scandir(self._pool))

    def _reserve(self, fd: int, num_bytes: int, what: str) -> None:
        """Give a new segment its memory; the unused ones are freed when it would not fit otherwise."""
        if os.fstat(fd).st_size >= num_bytes:
            return None
        try:
            _allocate(fd, num_bytes)
        except OSError as error:
            if error.errno == errno.ENOSPC and self._trim(fd):
                return self._reserve(fd, num_bytes, what)
            raise StoreError(
                f"no room for {what}: {num_bytes} bytes needed, {free_bytes(self._folder)} free in {self._folder} "
                f"({error.strerror}); give that file system more room (a container: --shm-size), or keep less there"
            ) from error

    def _trim(self, own_fd: int) -> int:
        """Give the memory of free segments that nobody reads back to the system; return how many there were."""
        num_freed = 0
        with self.locked(exclusive=True):
            for size, path in self._free():
                if not size or (fd := _try_own(path)) is None:
                    continue
                # Truncated as well: another process may keep a warm map of it, which would hold the memory.
                os.ftruncate(fd, 0)
                path.unlink()
                os.close(fd)
                num_freed += 1
        os.ftruncate(own_fd, 0)
        return num_freed

    def _map_warm(self, fd: int) -> mmap.mmap:
        """Return a writable map. The last few are kept: touching the pages of a new one costs more than the copy."""
        status = os.fstat(fd)
        with self._warm_guard:
            # A kept map holds its inode, so the number cannot name another file meanwhile.
            kept = self._warm.pop(status.st_ino, None)
            if kept is None:
                kept = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED | _POPULATE)
            self._warm[status.st_ino] = kept
            while len(self._warm) > MAX_WARM_MAPS:
                self._warm.popitem(last=False)
            return kept


def map_readonly(fd: int) -> mmap.mmap:
    """Return a read-only map of a segment. It owns a duplicate of `fd`, so the shared lock lives as long as the map."""
    return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)


def _try_lock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_own(path: Path) -> int | None:
    """Return a descriptor that locks a free segment exclusively, or None while somebody reads or writes it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if _try_lock(fd, fcntl.LOCK_EX):
        return fd
    os.close(fd)
    return None


def _allocate(fd: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    # macOS: written zeros reserve memory too.
    block = bytes(1 << 20)
    for start in range(0, num_bytes, len(block)):
        os.pwrite(fd, block[: num_bytes - start], start)
