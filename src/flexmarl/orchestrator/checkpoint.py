"""Checkpoints: a folder per version with each policy's full state as safetensors and one manifest, written atomically.

A folder `step_N` exists only when it is complete: it is written under another name, synced, and renamed. Nothing here
needs torch. The functions block; the orchestrator runs them through `Runtime.call`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexmarl.core.codec import from_plain, to_plain
from flexmarl.core.errors import ConfigError, StoreError
from flexmarl.core.ids import ObjectKey, PolicyName
from flexmarl.core.layout import Layout
from flexmarl.core.protocols import ObjectPlane
from flexmarl.objects import read_safetensors, write_safetensors

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
SET_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheckpoint:
    """One policy in a checkpoint."""

    weights_version: int
    weights_digest: str
    file: str
    file_sha256: str
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a resumed run needs beside the configuration; the data cursor derives from `policy_version`."""

    format_version: int
    policy_version: int
    run_seed: int
    data_digest: str
    """Of the training queries: a resumed run must see the same."""
    policies: Mapping[PolicyName, PolicyCheckpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyToSave:
    """A policy's state on the object plane."""

    weights_version: int
    weights_digest: str
    state_key: ObjectKey


def data_digest(queries: object) -> str:
    """Return the SHA-256 of the queries, in hex."""
    return hashlib.sha256(json.dumps(queries, sort_keys=True, default=str).encode()).hexdigest()


def write_checkpoint(
    folder: Path,
    *,
    policy_version: int,
    run_seed: int,
    queries_digest: str,
    policies: Mapping[PolicyName, PolicyToSave],
    objects: ObjectPlane,
    keep_last: int,
) -> Path:
    """Write `folder/step_N`, remove all but the newest `keep_last`, and return the new one's path.

    Raises:
        StoreError: the disk is full or read-only; older checkpoints are untouched.
    """
    target = folder / f"step_{policy_version}"
    draft = folder / f".step_{policy_version}.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        saved = {policy: _save_policy(draft, policy, state, objects) for policy, state in policies.items()}
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            policy_version=policy_version,
            run_seed=run_seed,
            data_digest=queries_digest,
            policies=saved,
        )
        _write_synced(draft / MANIFEST_NAME, json.dumps(to_plain(manifest), indent=1).encode())
        _sync(draft)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        _sync(folder)
    except (OSError, StoreError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StoreError(f"cannot write checkpoint {target}: {error}; free space, then resume the run") from error
    for _, old in list_checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (policy_version, path) of each complete checkpoint, oldest first."""
    found = []
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit() and (path / MANIFEST_NAME).is_file():
            found.append((int(number), path))
    return sorted(found)


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        StoreError: it is missing, damaged, or of a newer format.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        found = plain["format_version"]
        if found != FORMAT_VERSION:
            raise StoreError(f"{path}: checkpoint format {found}, this version of flexmarl reads {FORMAT_VERSION}")
        return from_plain(Manifest, plain)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise StoreError(
            f"{path} is damaged or unreadable ({error}); remove {checkpoint} to use an older one"
        ) from error


def load_policy_state(checkpoint: Path, policy: PolicyName, manifest: Manifest, objects: ObjectPlane) -> ObjectKey:
    """Put a policy's state from a checkpoint on the object plane and return its key.

    Raises:
        StoreError: the file is missing or damaged.
    """
    entry = manifest.policies[policy]
    try:
        packed = read_safetensors(checkpoint / entry.file, entry.layout, sha256=entry.file_sha256)
    except StoreError as error:
        raise StoreError(f"{error}; remove {checkpoint} to use an older one") from error
    key = ObjectKey("state", policy, entry.weights_version)
    objects.set(key, packed).result(SET_TIMEOUT_S)
    return key


def _save_policy(draft: Path, policy: PolicyName, state: PolicyToSave, objects: ObjectPlane) -> PolicyCheckpoint:
    packed = objects.packed(state.state_key)
    name = f"{policy}.safetensors"
    sha256 = write_safetensors(draft / name, packed)
    return PolicyCheckpoint(
        weights_version=state.weights_version,
        weights_digest=state.weights_digest,
        file=name,
        file_sha256=sha256,
        layout=packed.layout,
    )


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
