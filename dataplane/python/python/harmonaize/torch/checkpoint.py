"""Protected state as checkpoints of ``torch.distributed.checkpoint``.

    from harmonaize.torch.checkpoint import read_checkpoint, write_checkpoint

A checkpoint has the step under ``step``. Under ``rank-0`` and so on it has the tensors of each rank by their names. Ranks are
those of when the state was protected.
"""

import json
import mmap
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .. import _core
from .._errors import ArgumentError, ProtectionError

__all__ = ["read_checkpoint", "write_checkpoint"]

# What safetensors calls types.
_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def write_checkpoint(
    path: str | PathLike[str],
    states: Iterable[_core.Protection | _core.RankState],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> int:
    """Writes states to a new folder of ``torch.distributed.checkpoint``, and returns their step.

    Of a ``Protection`` it is the last sealed state of this rank, so its tensors may change meanwhile. Tensors have the shapes that
    they were protected with. ``shapes`` gives some other shapes, by their names, where a size may be -1. Until it returns,
    ``TMPDIR`` has a copy of each state.

    Where torch has a process group, all its ranks call this, each with states of its own or none. With ``no_dist``, or without a
    group, this process writes alone.

    ``ArgumentError``: a shape does not fit, or there is no state. ``ProtectionError``: ``"Differ"`` where steps do, ``"Peers"``
    where another rank fails, ``"File"`` where the folder has a checkpoint already or is not written, and those of
    ``write_safetensors``.
    """
    no_dist = no_dist or not dist.is_initialized()
    steps, ranks, failed = set(), {}, None
    try:
        for state in states:
            rank, step, tensors = _read_state(state, shapes or {})
            steps.add(step)
            ranks[f"rank-{rank}"] = tensors
    except BaseException as error:
        # The others wait for what this rank has. What its frames hold of states is no longer needed.
        traceback.clear_frames(error.__traceback__)
        ranks, tensors, failed = {}, None, error
    own = (steps, failed and (str(failed) or type(failed).__name__))
    found = [own]
    if not no_dist:
        found *= dist.get_world_size(process_group)
        dist.all_gather_object(found, own, group=process_group)
    if failed is not None:
        try:
            raise failed
        finally:
            failed = None
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise _error("Peers", f"rank {rank} has no state to write: {text}")
    steps = set().union(*(steps for steps, _ in found))
    if len(steps) > 1:
        named = ", ".join(map(str, sorted(steps)))
        raise _error("Differ", f"a checkpoint is of one step; here are states of {named}: seal or restore first, at all ranks")
    if not steps:
        raise ArgumentError("a checkpoint of no state; give a Protection, or states of a restore")
    (step,) = steps
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.save(
                {"step": step, **ranks},
                storage_writer=dcp.FileSystemWriter(path, overwrite=False),
                process_group=process_group,
                no_dist=no_dist,
            )
    except dcp.CheckpointException as error:
        raise _error("File", f"{path} is not written: {_causes(error)}") from None
    return step


def read_checkpoint(path: str | PathLike[str], rank: int, tensors: Mapping[str, _core.Tensor]) -> int:
    """Reads a rank's tensors from a folder of :func:`write_checkpoint`, and returns their step.

    ``rank`` is whose they are, as it was when they were protected. Each tensor has the type and the number of elements of the one
    that is read. Tensors that are not named stay in the folder. No other rank has to call it. Read folders that you trust alone:
    torch unpickles what they have.

    ``ArgumentError``: there is no such tensor, or one of another type or size; nothing is read then. ``ProtectionError``:
    ``"File"`` where the folder cannot be read, and ``"Damaged"`` where it is no such checkpoint. Tensors may be written in part then.
    """
    reader = dcp.FileSystemReader(path)
    entries = _metadata(reader, path).state_dict_metadata
    if "step" not in entries:
        raise _error("Damaged", f"{path} has no step, and so no protected state")
    into = {name: _view(path, f"rank-{rank}.{name}", entries, tensor) for name, tensor in tensors.items()}
    state: dict[str, Any] = {"step": None}
    if into:
        state[f"rank-{rank}"] = into
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(state, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise _error("File", f"{path} is not read: {_causes(error)}") from None
    if not isinstance(state["step"], int):
        raise _error("Damaged", f"{path} has a step that is no number")
    return state["step"]


def _read_state(state, shapes):
    """Rank, step, and tensors of a state: of a file that is gone once nobody has the tensors."""
    with tempfile.TemporaryDirectory(prefix="harmonaize-") as folder:
        path = Path(folder, "state.safetensors")
        state.write_safetensors(path)
        with path.open("rb") as file:
            image = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    begin = 8 + int.from_bytes(image[:8], "little")
    header = json.loads(image[8:begin])
    metadata, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        dtype, (first, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        count = (end - first) // dtype.itemsize
        # Of no elements torch makes no tensor of a buffer.
        tensor = torch.frombuffer(image, dtype=dtype, count=count, offset=begin + first) if count else torch.empty(0, dtype=dtype)
        try:
            tensors[name] = tensor.reshape(tuple(shapes.get(name, entry["shape"])))
        except RuntimeError as error:
            shape = tuple(shapes[name])
            raise ArgumentError(f"the tensor {name!r} has {count} elements, which do not have the shape {shape}") from error
    return int(metadata["rank"]), int(metadata["step"]), tensors


def _metadata(reader, path) -> Metadata:
    try:
        found = reader.read_metadata()
    except OSError as error:
        raise _error("File", f"{path} is not read: {error}") from error
    except Exception as error:
        # What unpickles something else may raise anything.
        raise _error("Damaged", f"{path} has no metadata of a checkpoint: {error}") from error
    if not isinstance(found, Metadata):
        raise _error("Damaged", f"{path} has no metadata of a checkpoint")
    return found


def _view(path, key, entries, tensor):
    """A tensor as torch's, of the shape that the folder has it in."""
    entry, found = entries.get(key), tensor.torch()
    if not isinstance(entry, TensorStorageMetadata):
        named = sorted(entries)
        more = f" and {len(named) - 8} others" if len(named) > 8 else ""
        raise ArgumentError(f"{path} has no {key!r}; it has {', '.join(named[:8])}{more}")
    stored = entry.properties.dtype
    if (stored, entry.size.numel()) != (found.dtype, found.numel()):
        raise ArgumentError(
            f"{key!r} has {entry.size.numel()} elements of {stored}, and the tensor {found.numel()} of {found.dtype}"
        )
    return found.reshape(entry.size)


def _causes(error):
    """What of an error of torch's says why, without its traces."""
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())


def _error(status, text):
    error = ProtectionError(text)
    error.status = status
    return error
