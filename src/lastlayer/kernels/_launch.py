"""Launches Triton kernels with little host time, in the first call of a process and in later ones.

At every launch Triton binds the arguments, reads its settings from the environment and queries the
driver about every pointer, which takes longer than most of our kernels run. The compiled kernel
depends on the dtypes, on which pointers are multiples of 16, on the numbers and on the constants.
:class:`Kernel` caches the compiled kernel with these as key, and calls Triton's launcher directly.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import compiler
from triton.runtime import cache
from triton.runtime.jit import JITFunction

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Number of launches that a kernel caches: batches may have any number of rows.
MOST_PREPARED = 1024
# Types of the arguments that are not tensors. An instance of a subclass would be read as a tensor.
_NUMBERS = frozenset({int, float, bool, type(None)})
# Integers of at least this size have 64 bits.
_LARGE = 1 << 31


class Kernel(JITFunction):  # type: ignore[misc]
    """A Triton kernel, launched as usual by ``kernel[grid](*args, **constants)``.

    Keywords are constants of the kernel or options of the compiler, in the same order at every
    launch. All other arguments are positional. Launches with a profiler's hook, and the first
    launch per cache key, go through Triton.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._prepared: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        # Numbers that kernels are not specialised for, such as row counts: only their type counts.
        self._by_type = frozenset(each.num for each in self.params if each.do_not_specialize)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        device = torch._C._cuda_getDevice()
        key: list[Any] = [device]
        passed: list[Any] = []
        for each in args:
            if type(each) in _NUMBERS:
                passed.append(each)
                key.append(each)
            else:
                pointer = each.data_ptr()
                passed.append(pointer)
                # A tensor that is not on a GPU goes through Triton, which raises its own error.
                plain = not pointer & 15 and each.is_cuda
                key.append(each.dtype if plain else (each.is_cuda, pointer & 15 == 0, each.dtype))
        for place in self._by_type:
            if type(each := args[place]) is int:
                key[place + 1] = -_LARGE <= each < _LARGE
        kept = *key, *constants.values()
        prepared = self._prepared.get(kept)
        hook = knobs.runtime.launch_enter_hook
        if prepared is None or (hook is not None and getattr(hook, "calls", True)):
            made = self.run(*args, grid=grid, warmup=False, **constants)
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            tail = tuple([constants[each.name] for each in self.params[len(args) :]])
            # The kernel itself is kept, too: Triton 3.9 unloads one that nothing refers to.
            self._prepared[kept] = made.run, made.function, made.packed_metadata, tail, made
            return
        run, function, metadata, tail, _ = prepared
        wide, high, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(wide, high, deep, stream, function, metadata, None, None, None, *passed, *tail)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` for kernels that are launched; functions that kernels call use Triton's."""
    if INTERPRETED:
        return triton.jit(function, **options)
    return functools.partial(Kernel, **options) if function is None else Kernel(function, **options)


def _kept_triton_key() -> None:
    """Caches Triton's hash of itself on disk.

    Before the first kernel of a process, Triton hashes its own library, half a gigabyte, which
    takes longer than everything else. The hash is stored in Triton's cache, with the sizes and
    modification times of the hashed files as key.
    """
    module = next((each for each in (cache, compiler) if hasattr(each, "triton_key")), None)
    if module is None:
        return
    make_key = module.triton_key

    @functools.cache
    def triton_key() -> str:
        root = Path(triton.__file__).parent
        files = [root / "runtime/cache.py", *root.glob("_C/libtriton*")]
        files += (each for folder in ("compiler", "backends", "language")
                  for each in (root / folder).rglob("*.py"))  # fmt: skip
        found = ((each, each.stat()) for each in sorted(files))
        stamp = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]
        kept = cache.get_cache_manager(hashlib.sha256(repr(stamp).encode()).hexdigest())
        path = kept.get_file("triton_key")
        if path is not None:
            return Path(path).read_text()
        key = make_key()
        kept.put(key, "triton_key", binary=False)
        return key

    module.triton_key = triton_key


_kept_triton_key()
