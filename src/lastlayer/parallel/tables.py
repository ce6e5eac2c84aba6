"""Creates, initialises, saves and loads tables whose rows are sharded over processes.

The saved file is that of a plain head, with tensors of the global shapes. Each process reads and
writes only its own rows, so no process ever stores a whole table.
"""

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from lastlayer._processes import Layout, Shards, gathered_in_first, in_step
from lastlayer._torch import as_numpy
from lastlayer.heads import CharCNNSoftmax, Head, NoiseContrastive
from lastlayer.heads.distributed import made_by_fsdp
from lastlayer.parallel.sampler_tables import spreadable_tables, without_state

_CONFIG, _STATE = "config.json", "model.safetensors"
# Number of rows whose initial values come from one generator.
_BLOCK = 4096
# The names of dtypes in safetensors, and numpy dtypes; of the same size if numpy lacks the dtype.
_DTYPES = {
    torch.float64: ("F64", np.float64), torch.float32: ("F32", np.float32),
    torch.float16: ("F16", np.float16), torch.bfloat16: ("BF16", np.uint16),
    torch.int64: ("I64", np.int64), torch.int32: ("I32", np.int32),
    torch.int8: ("I8", np.int8), torch.uint8: ("U8", np.uint8), torch.bool: ("BOOL", np.bool_),
}  # fmt: skip
_NAMED = {name: dtype for dtype, (name, _) in _DTYPES.items()}


def value_of(head: torch.nn.Module, name: str) -> Any:
    """The parameter or buffer of that name."""
    path, _, last = name.rpartition(".")
    return getattr(head.get_submodule(path), last)


def set_tensor(head: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces the parameter or buffer of that name."""
    path, _, last = name.rpartition(".")
    owner = head.get_submodule(path)
    if last in owner._parameters:
        before = owner._parameters[last]
        needed = before is not None and before.requires_grad
        owner._parameters[last] = Parameter(tensor, requires_grad=needed)
    else:
        owner._buffers[last] = tensor


def local_rows(tensor: Any) -> Tensor:
    """This process's rows of a DTensor, without a gradient; writing to them changes the DTensor."""
    rows: Tensor = tensor.detach().to_local()
    return rows


def spread_tensor(tensor: Tensor, mesh: Any, layout: Layout | None) -> Any:
    """Shards the rows of a tensor over a mesh; the values of the first process are used."""
    tensor = tensor.detach()
    if tensor.is_meta:
        here = Shards.even(mesh.get_group(), tensor.shape[0]).here
        return _from_part(tensor.new_empty(here, *tensor.shape[1:]), mesh, tensor.shape)
    rows = _in_rows(tensor, layout)
    if dist.get_backend(mesh.get_group()) == "gloo" and rows.device.type != "cpu":
        # gloo only sends CPU tensors.
        shared = rows.cpu()
        dist.broadcast(shared, dist.get_global_rank(mesh.get_group(), 0), group=mesh.get_group())
        return _from_part(cut(shared.to(rows.device), mesh, None), mesh, rows.shape)
    return distribute_tensor(rows, mesh, [Shard(0)])


def cut(values: Tensor, mesh: Any, layout: Layout | None) -> Tensor:
    """This process's rows of values that all processes have."""
    shard = Shards.even(mesh.get_group(), values.shape[0])
    return _in_rows(values, layout)[shard.first : shard.first + shard.here]


def _from_part(part: Tensor, mesh: Any, shape: torch.Size) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _in_rows(values: Tensor, layout: Layout | None) -> Tensor:
    """Reorders values from class ids to rows of a table."""
    if layout is None or layout.step == 1:
        return values
    return values[layout.classes_at(torch.arange(layout.n_classes, device=values.device))]


def _in_classes(rows: Tensor, layout: Layout | None) -> Tensor:
    """Reorders rows of a table to class ids."""
    if layout is None or layout.step == 1:
        return rows
    return rows[layout.rows_of(torch.arange(layout.n_classes, device=rows.device))]


@torch.no_grad()
def fill_from_counter(head: Any, family: Any, seed: int, device: torch.device) -> None:
    """Initialises meta tensors; the values of a row depend only on the seed and its index."""
    spread = [name for name in family.names if value_of(head, name).is_meta]
    for name in spread:
        shape, dtype = value_of(head, name).shape, value_of(head, name).dtype
        shard = Shards.even(family.group, shape[0])
        part = torch.empty(shard.here, *shape[1:], dtype=dtype, device=device)
        fan_in = shape[1] if len(shape) == 2 else head.in_features
        for rows, generator, n in _blocks(name, seed, shard):
            fresh = torch.empty(n, *shape[1:], dtype=torch.float32)
            if isinstance(head, CharCNNSoftmax):
                # As in its reset_parameters: zero biases and small corrections.
                fresh = (
                    fresh.zero_()
                    if len(shape) == 1
                    else fresh.normal_(std=0.1, generator=generator)
                )
            else:
                bound = 1.0 / math.sqrt(fan_in)
                fresh.uniform_(-bound, bound, generator=generator)
            part[rows.start - shard.first : rows.stop - shard.first] = fresh[
                rows.start % _BLOCK : rows.start % _BLOCK + rows.stop - rows.start
            ].to(part)
        set_tensor(head, name, _from_part(part, family.mesh, shape))
    _fill_others(head, {*family.names}, seed, device)
    head._make_ready()
    if isinstance(head, NoiseContrastive) and "bias" in spread:
        log_q = family.log_q()
        local_rows(head.bias).copy_(log_q + (0.0 if head.learns_log_z else head._log_z_as(log_q)))


def _blocks(name: str, seed: int, shard: Shards) -> Iterator[tuple[slice, torch.Generator, int]]:
    """Yields this process's rows of each block, the block's generator and its size."""
    last = shard.first + shard.here
    for block in range(shard.first // _BLOCK, -(-last // _BLOCK) if shard.here else 0):
        number = zlib.crc32(f"{seed}/{name}/{block}".encode())
        begin, end = block * _BLOCK, min((block + 1) * _BLOCK, shard.n_classes)
        rows = slice(max(begin, shard.first), min(end, last))
        yield rows, torch.Generator().manual_seed(number), end - begin


def _fill_others(head: Any, spread: set[str], seed: int, device: torch.device) -> None:
    """Initialises replicated parameters."""
    meta = [name for name, each in head.named_parameters() if name not in spread and each.is_meta]
    for name in meta:
        like = value_of(head, name)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        fresh = torch.empty(like.shape, dtype=torch.float32)
        bound = 1.0 / math.sqrt(like.shape[-1] if like.dim() > 1 else head.in_features)
        fresh.uniform_(-bound, bound, generator=generator)
        set_tensor(head, name, fresh.to(device, like.dtype))
    if isinstance(head, CharCNNSoftmax) and meta:
        # The network has its own initialisation, which uses torch's global generator.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head.cnn.reset_parameters()
            head._reset_correct()
    if isinstance(head, NoiseContrastive) and isinstance(head.log_z, Tensor):
        head.log_z.zero_()


def gathered_head(module: Any) -> Head:
    """A plain head with all classes in the first process; on the meta device in the others."""
    from lastlayer.parallel.families import swapped

    head, first, whole = module.head, dist.get_rank(module.group) == 0, {}
    with sharded_by_class(module):
        for name in module._family.names:
            value = value_of(head, name)
            full = gathered_in_first(local_rows(value), value.shape, module.group)
            whole[name] = _in_classes(full, module._layout_of(name)) if first else full
    with swapped(head, whole):
        config = {**head.config(), "device": "meta"}
        if spreadable_tables(config.get("sampler")):
            config["sampler"] = without_state(config["sampler"])
        made = type(head)(**config)
        state = {
            name: each if name in whole else each.detach().clone()
            for name, each in head.state_dict().items()
        }
    if first:
        made.load_state_dict(state, assign=True)
        made._make_ready()
    made.train(head.training)
    plain: Head = made
    return plain


def _header(head: Any) -> tuple[bytes, dict[str, tuple[int, torch.Size, torch.dtype]]]:
    """The header of a safetensors file for the state, and the offset of each tensor in it."""
    entries, offset, places = {}, 0, {}
    for name, value in head.state_dict().items():
        size = value.numel() * value.element_size()
        entries[name] = {
            "dtype": _DTYPES[value.dtype][0],
            "shape": [*value.shape],
            "data_offsets": [offset, offset + size],
        }
        places[name] = offset, value.shape, value.dtype
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    found = {name: (begin + at, shape, dtype) for name, (at, shape, dtype) in places.items()}
    return len(text).to_bytes(8, "little") + text, found


def _memory(path: Path, place: tuple[int, torch.Size, torch.dtype], mode: str) -> Any:
    at, shape, dtype = place
    return np.memmap(path, _DTYPES[dtype][1], mode, offset=at, shape=tuple(shape))  # type: ignore[call-overload]


def write_tables(module: Any, folder: Path) -> None:
    """Writes the state to one file, each process its own rows; then the config."""
    head, group, device = module.head, module.group, module.mesh.device_type
    first = dist.get_rank(group) == 0
    # Of the file's own name, since other groups of a larger mesh may save the same head.
    path = folder / f"{_STATE}.part{dist.get_global_rank(group, 0)}"
    header, places = _header(head)

    def begin() -> None:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(header)
                file.truncate(max(len(header), *(
                    at + shape.numel() * dtype.itemsize for at, shape, dtype in places.values()
                )))  # fmt: skip

    def write() -> None:
        if not path.is_file():
            raise FileNotFoundError(
                f"folder: expected one that all processes can access, got {folder}, where process "
                f"{dist.get_rank()} does not find the file of the first process"
            )
        for name, place in places.items():
            if place[1].numel():
                _write(module, name, path, place)

    def end() -> None:
        if first:
            path.replace(folder / _STATE)
            head.save_config(folder)

    with sharded_by_class(module):
        for step in (begin, write, end):
            in_step(step, group, device)


def _write(module: Any, name: str, path: Path, place: Any) -> None:
    """Writes this process's rows of a tensor; the first process writes those that are not sharded.

    Args:
        module: the ClassParallel.
        name: name of the tensor in the state of the head.
        path: the file.
        place: offset in the file, shape and dtype.
    """
    value, group = value_of(module.head, name), module.group
    if name not in {*module._family.names}:
        if dist.get_rank(group) == 0:
            memory = _memory(path, place, "r+")
            memory[...] = _as_bits(value)
            memory.flush()
        return
    shard, layout = Shards.even(group, value.shape[0]), module._layout_of(name)
    if not shard.here:
        return
    rows: Any = slice(shard.first, shard.first + shard.here)
    if layout is not None and layout.step != 1:
        rows = layout.classes_at(torch.arange(rows.start, rows.stop)).numpy()
    memory = _memory(path, place, "r+")
    memory[rows] = _as_bits(local_rows(value))
    memory.flush()


@contextmanager
def sharded_by_class(module: Any) -> Iterator[None]:
    """A context in which parameters are sharded by class alone, even if FSDP2 has sharded them too.

    Raises:
        ValueError: if FSDP2 shards them with those of a larger module.
    """
    if made_by_fsdp(type(module)):
        module.unshard()
    try:
        if any(value_of(module.head, name).device_mesh.ndim != 1 for name in module._family.names):
            raise ValueError(
                "ClassParallel: expected parameters sharded by class, got some that fully_shard "
                "has sharded together with a larger module; call fully_shard(head, mesh=...) for "
                "the ClassParallel itself before the larger module"
            )
        yield
    finally:
        if made_by_fsdp(type(module)):
            module.reshard()


def _as_bits(values: Tensor) -> Any:
    values = values.detach().cpu().contiguous()
    # FSDP2 resizes the storage, which Tensor.numpy() would make impossible.
    return as_numpy(values.view(torch.uint16) if values.dtype == torch.bfloat16 else values)


def read_tables(
    kind: Any, folder: Path, mesh: Any, device: torch.device | str | None, options: dict[str, Any]
) -> Any:
    """Loads a saved head and shards it; each process reads its own rows."""
    path = folder / _STATE
    device = torch.device(mesh.device_type) if device is None else torch.device(device)
    head, known = in_step(lambda: _opened(folder), mesh.get_group(), mesh.device_type)
    module = kind(head, mesh, **options)
    family, expected = module._family, head.state_dict()
    for name in expected:
        set_tensor(head, name, _read(module, name, path, known[name], device))
    for name, each in (*head.named_parameters(), *head.named_buffers()):
        if each.is_meta and name not in expected:
            set_tensor(head, name, torch.empty_like(each, device=device))
    head._ready_on, head._unfilled = None, {}
    head._make_ready()
    family.__dict__.pop("classes", None)
    return module


def _opened(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A head on the meta device from a folder, and where its tensors are in the file."""
    for name in (_CONFIG, _STATE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"folder: expected {_CONFIG} and {_STATE}, as written by save, got {folder}, "
                f"which has no {name}"
            )
    head, path = Head.load_config(folder, device="meta"), folder / _STATE
    known = _places_in(path)
    for name, each in head.state_dict().items():
        if name not in known:
            raise ValueError(f"folder: expected {name} in {path}, got a file without it")
        if known[name][1] != each.shape:
            raise ValueError(
                f"folder: expected {name} of shape {tuple(each.shape)} in {path}, got "
                f"{tuple(known[name][1])}"
            )
    return head, known


def _read(module: Any, name: str, path: Path, place: Any, device: torch.device) -> Any:
    """Reads a tensor from a file, or this process's rows of it if it is sharded."""
    family, (_, shape, dtype) = module._family, place
    values = _memory(path, place, "r") if shape.numel() else np.empty(tuple(shape))
    if name not in {*family.names}:
        return _as_tensor(np.array(values), dtype).to(device)
    shard, layout = Shards.even(family.group, shape[0]), module._layout_of(name)
    rows = torch.arange(shard.first, shard.first + shard.here)
    if layout is not None and layout.step != 1:
        # Indexing with an array copies.
        part = values[layout.classes_at(rows).numpy()]
    else:
        part = np.array(values[shard.first : shard.first + shard.here])
    return _from_part(_as_tensor(part, dtype).to(device), module.mesh, shape)


def _as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    made = torch.from_numpy(values)
    return made.view(dtype) if dtype == torch.bfloat16 else made.to(dtype)


def _places_in(path: Path) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """The offset of each tensor in a file, its shape and its dtype."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"folder: expected {path} as written by save, got a truncated file")
        entries = json.loads(file.read(size))
    return {
        name: (8 + size + each["data_offsets"][0], torch.Size(each["shape"]), _NAMED[each["dtype"]])
        for name, each in entries.items()
        if name != "__metadata__"
    }
