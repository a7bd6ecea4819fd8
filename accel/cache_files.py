"""The files of the kernel cache: where they lie, whom they are trusted from, what they hold.

What a cache file holds is unpickled and run. So a folder that others can write is refused, and a
file is read only if it ends in the SHA-256 of its bytes, its name and its folder's.
"""

import atexit
import contextlib
import hashlib
import os
import pickle
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile

from accel import system

_DIGEST = 32


class Damaged(Exception):
    """A file of the cache, its argument, does not hold what was written."""


class CheckedFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Numba's index and data files of one function, each ending in its hash."""

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (key, data))

    def load(self, key: Any) -> Any:
        """Return the code for ``key``; None if there is none.

        The index is written before the data. A process that ends between the two leaves an index
        that names another key's data, so the data say themselves whose they are.
        """
        found = super().load(key)
        return None if found is None or found[0] != key else found[1]

    def _load_index(self) -> Any:
        try:
            return self._read(Path(self._index_path))
        except FileNotFoundError:
            return {}

    def _save_index(self, overloads: Any) -> None:
        self._write(Path(self._index_path), overloads)

    def _load_data(self, name: str) -> Any:
        return self._read(Path(self._data_path(name)))

    def _save_data(self, name: str, data: Any) -> None:
        self._write(Path(self._data_path(name)), data)

    def _read(self, path: Path) -> Any:
        content = path.read_bytes()
        data, digest = content[:-_DIGEST], content[-_DIGEST:]
        if self._digest(path, data) != digest:
            raise Damaged(path)
        return pickle.loads(data)

    def _write(self, path: Path, content: Any) -> None:
        data = self._dump(content)
        with self._open_for_write(str(path)) as file:
            file.write(data + self._digest(path, data))

    def _digest(self, path: Path, data: bytes) -> bytes:
        hashed = hashlib.sha256(f"{self._source_stamp}/{path.name}\0".encode())
        hashed.update(data)
        return hashed.digest()


def check_private(*folders: Path) -> None:
    """Refuse folders that others than this user and root can write.

    Raises
    ------
    PermissionError
        What is loaded from there would run as this user.
    """
    for folder in folders:
        if folder.exists() and not system.private(folder.stat()):
            raise PermissionError(
                f"compiled kernels are not loaded from {folder}, because other users can write "
                f"there: chmod go-w {folder} if it is yours, or point MYLLM_CACHE_DIR elsewhere"
            )


def default_root() -> Path | None:
    """Return the folder under which compiled kernels are kept; None where there is no home."""
    named = named_root()
    if named is not None:
        return Path(os.environ[named]).expanduser().absolute() / "kernels"
    home = system.cache_home()
    return None if home is None else home / "myllm" / "kernels"


def named_root() -> str | None:
    """Return the environment variable by which the user chose a cache folder, if one did."""
    return next((n for n in ("MYLLM_CACHE_DIR", "NUMBA_CACHE_DIR") if os.environ.get(n)), None)


def temporary_root(why: str) -> Path:
    """Return a folder under the system's temporary one, which only this user can write.

    Compiled code is loaded from it, so a folder that somebody else could fill is not used.
    """
    path = Path(tempfile.gettempdir(), f"myllm-{system.user_name()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or not system.private(info) or not os.access(path, os.W_OK):
        path = private_folder()
    say(f"{why}: compiled kernels go to {path}; set MYLLM_CACHE_DIR to a folder that lasts")
    return path / "kernels"


def private_folder() -> Path:
    """Return a new folder that goes when this process ends."""
    path = tempfile.mkdtemp(prefix="myllm-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def say(message: str) -> None:
    print(f"myllm: {message}", file=sys.stderr, flush=True)
