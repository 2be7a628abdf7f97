"""Reader for IDX files of bytes, the format of MNIST and its relatives.

Turns one file into one array; knows no data set and searches no folder; standard library and numpy only. The
format: two zero bytes, the element type, the number of dimensions, each size as a big-endian 32-bit integer,
then the elements in C order (LeCun, Cortes, Burges: The MNIST database of handwritten digits).
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from hydssp.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, sha256_prefix: str = "") -> np.ndarray:
    """Read one IDX file, gzipped or plain (told apart by content, not by name).

    Args:
        path: The file.
        sha256_prefix: First hex digits of the SHA-256 of the *uncompressed* file; empty: not verified.
            (Compressed files differ between distributors.)

    Returns:
        Read-only uint8 array of the shape that the file states.

    Raises:
        UserError: When the file cannot be read or unpacked, is no IDX file of bytes, is shorter or longer
            than it says, or does not have that checksum.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _unusable(path, f"cannot be read: {error}") from error
    if sha256_prefix:
        found = hashlib.sha256(content).hexdigest()
        if not found.startswith(sha256_prefix):
            raise _unusable(
                path,
                f"has SHA-256 {found[: len(sha256_prefix)]}… (uncompressed) instead of {sha256_prefix}…;"
                " data.verify=false accepts it as it is",
            )
    if len(content) < 4 or content[:2] != b"\0\0":
        raise _unusable(path, "is not an IDX file (it must begin with two zero bytes)")
    element_type, num_dimensions = content[2], content[3]
    if element_type != _UNSIGNED_BYTE:
        raise _unusable(
            path, f"holds elements of type 0x{element_type:02x}; only unsigned bytes (0x08) are read"
        )
    offset = 4 + 4 * num_dimensions
    if len(content) < offset:
        raise _unusable(path, "ends within its header")
    shape = tuple(np.frombuffer(content, ">u4", num_dimensions, 4).tolist())
    if len(content) - offset != math.prod(shape):
        raise _unusable(path, f"holds {len(content) - offset} elements, but its header says {list(shape)}")
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape)


def _unusable(path: Path, what: str) -> UserError:
    return UserError(
        f"data: the file {path} {what}. Replace the file, or set data.root to a folder with a good copy"
    )
