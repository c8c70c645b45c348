"""Packed objects as safetensors files, synced to disk. Without torch."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from flexmarl.core.errors import StoreError
from flexmarl.core.layout import Layout, PackedObject


def write_safetensors(path: Path, packed: PackedObject, *, metadata: Mapping[str, str] | None = None) -> str:
    """Write the tensors, synced to disk, and return the SHA-256 of the file.

    Raises:
        StoreError: the file cannot be written; a part of it may be left.
    """
    import numpy as np
    import safetensors

    start = np.frombuffer(packed.buffer, dtype=np.uint8).ctypes.data if packed.layout.num_bytes else 0
    specs = {
        entry.name: safetensors.TensorSpec(
            dtype=entry.dtype,
            shape=entry.shape,
            data_ptr=start + entry.offset_bytes,
            data_len=entry.num_bytes,
        )
        for entry in packed.layout.entries
    }
    try:
        safetensors.serialize_file(specs, str(path), metadata=dict(metadata) if metadata else None)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, safetensors.SafetensorError) as error:
        raise StoreError(f"cannot write {path} ({packed.layout.num_bytes} bytes): {error}") from error


def read_safetensors(path: Path, layout: Layout, *, sha256: str) -> PackedObject:
    """Return the tensors of a file in the given layout.

    Raises:
        StoreError: the file is missing, is not what was written, or lacks a tensor.
    """
    import safetensors

    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{path} is damaged: its SHA-256 is not the one recorded for it")
    tensors = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    buffer = memoryview(bytearray(layout.num_bytes))
    for entry in layout.entries:
        if entry.name not in tensors:
            raise StoreError(f"{path} has no tensor {entry.name}")
        buffer[entry.offset_bytes : entry.offset_bytes + entry.num_bytes] = tensors[entry.name]["data"]
    return PackedObject(layout=layout, buffer=buffer)
