"""What has to lie on disk for a while, in one file without a name, which not even a kill leaves behind."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from typing import IO

ALIGNED = 64  # bytes, as arrays in files are


class Spool:
    """A temporary file that grows; it goes when nobody holds it any more."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="onnxcalib-")  # noqa: SIM115 - it closes with its holder
        self.end = 0

    @contextlib.contextmanager
    def adding(self) -> Iterator[IO[bytes]]:
        """The file at a place where the next piece may begin; what fails there is forgotten."""
        self.file.seek(self.end)
        yield self.file
        self.file.flush()
        self.end = -(-self.file.seek(0, io.SEEK_CUR) // ALIGNED) * ALIGNED
