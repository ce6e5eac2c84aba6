"""Queries of torch's state, and everything that needs private functions of torch.

Accumulation dtypes and autocast; whether a call is plain eager code; whether the host may wait for
the device; what autograd is doing. All uses of ``torch._C`` are in this module.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.utils._python_dispatch
import torch.utils.checkpoint
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
# With older versions the DLPack exchange gives a read-only array.
_HAS_DLPACK = (
    hasattr(torch._C, "_to_dlpack_versioned") and np.lib.NumpyVersion(np.__version__) >= "2.1.0"
)
_NOTHING = nullcontext()
_checking_device_values: ContextVar[bool] = ContextVar("lastlayer_debug", default=False)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, losses and log-probabilities: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient is summed over rows whose factors are near 1.

    That sum can exceed the range of float16, so float16 gradients are summed in float32.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of ``tensor``; None if autocast is off or in float64."""
    device = _device_type(tensor)
    if device == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _device_type(tensor: Tensor) -> str:
    """``tensor.device.type``, without creating a device and a string for CPU tensors."""
    return "cpu" if tensor.is_cpu else tensor.device.type


def in_autocast_dtype(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype of autocast; unchanged if autocast is off, or in float64."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None or dtype == tensor.dtype else tensor.to(dtype)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which takes microseconds even if there is nothing to convert."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def forward_result(tensor: Tensor) -> Tensor:
    """The result of an autograd function's ``forward``, safe to trace with ``torch.compile``.

    Use it if the last operation may return one of its inputs: an operation in place, one with
    ``out=``, ``contiguous``, or ``to`` the same dtype. torch 2.11 then silently makes the compiled
    gradient zero.
    """
    return tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor


def is_eager(tensor: Tensor) -> bool:
    """Whether this is a plain eager call: no compiler, transform, dispatch mode or subclass.

    Nor forward mode, in which a tensor may have a tangent that kernels do not see.

    Functions are then called directly, which saves the host time of torch's dispatcher.
    """
    return (
        type(tensor) in _TENSOR_TYPES
        # Other tracers use tensor subclasses or dispatch modes.
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not forward_mode_is_active()
    )


def in_functorch() -> bool:
    """Whether a transform of ``torch.func``, such as vmap or grad, is active."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def constant_while_traced(function: _Function) -> _Function:
    """Makes ``torch.compile`` call a function while tracing and treat the result as a constant.

    Like ``torch.compiler.assume_constant_result``, which imports the compiler to set this mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Exported:
    """A tensor as input of ``numpy.from_dlpack``, faster than by ``Tensor.__dlpack__``."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return torch._C._to_dlpack_versioned(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU


class _Described:
    """A tensor as input of ``numpy.asarray``: slower than DLPack, but writable in all versions."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # keeps the memory
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": np.dtype(str(tensor.dtype).removeprefix("torch.")).str,
            "data": (tensor.data_ptr(), False),
            "strides": tuple([step * tensor.itemsize for step in tensor.stride()]),
            "version": 3,
        }


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A CPU tensor as an array that shares its memory, like ``tensor.detach().numpy()``.

    ``Tensor.numpy()`` makes the storage permanently non-resizable. FSDP2 frees parameters by
    resizing their storages, so it must not be called on them.
    """
    if type(tensor) not in _TENSOR_TYPES:
        # Subclasses may have no memory; Tensor.numpy() then raises an error.
        return tensor.detach().numpy()
    if _HAS_DLPACK:
        return np.from_dlpack(_Exported(tensor))
    if not tensor.numel():
        # Its pointer is null, which NumPy 2.2 rejects.
        return tensor.new_empty(tensor.shape).numpy()
    return np.asarray(_Described(tensor))


@contextmanager
def without_modes() -> Iterator[None]:
    """A context without dispatch modes and transforms, in which new tensors are real tensors."""
    with ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        if in_functorch():
            # Imported with torch.func, which is active.
            functorch: Any = sys.modules["torch._functorch.pyfunctorch"]
            stack.enter_context(functorch.temporarily_clear_interpreter_stack())
        yield


def keeps_float32(tensor: Tensor) -> bool:
    """Whether products in the dtype of ``tensor`` are as precise as float32: TF32 is not."""
    if tensor.itemsize < 4:
        return False
    if tensor.device.type != "cuda" or tensor.dtype == torch.float64:
        return True
    try:
        return not torch._C._get_cublas_allow_tf32()
    except RuntimeError:  # if both of torch's APIs for TF32 were used
        return False


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` for plain eager calls.

    The public one checks for ``torch.func`` transforms and inspects each argument in Python, which
    takes the host as long as a small operation.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def transforms_are_active() -> bool:
    """Whether a compiler, a transform of ``torch.func`` or forward mode must see a function."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_mode_is_active()
    )


def forward_mode_is_active() -> bool:
    """Whether this call is inside ``torch.autograd.forward_ad.dual_level()``.

    Tensors then may have a tangent without ``requires_grad``. An autograd function raises an error
    for it, whereas a kernel that is called directly would drop it.
    """
    return forward_ad._current_level >= 0


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether ``tensor`` is wrapped by a transform of ``torch.func``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_vmapped(tensor: Tensor) -> bool:
    """Whether ``tensor`` is batched: under ``vmap``, or in a batched backward pass.

    True in every ``torch.func`` transform.
    """
    return is_grads_batched(tensor) or torch._C._are_functorch_transforms_active()


def is_grads_batched(grad: Tensor) -> bool:
    """Whether a backward pass is batched: ``torch.autograd.grad(..., is_grads_batched=True)``.

    Only torch's own operations take such a gradient.
    """
    if torch.compiler.is_compiling():  # Dynamo cannot trace the next call.
        return False
    wrapped: bool = torch._C._functorch.is_legacy_batchedtensor(grad)
    return wrapped


def is_exporting() -> bool:
    """Whether torch.export is tracing.

    Up to torch 2.11 ``torch.compiler.is_exporting()`` is also true while torch.compile traces.
    """
    return torch.compiler._is_exporting_flag


def host_sync_allowed(tensor: Tensor) -> bool:
    """Whether the host may read values of ``tensor``: not during CUDA graph capture."""
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def values_are_checked(tensor: Tensor) -> bool:
    """Whether to check the values of ``tensor``.

    Always on a CPU; on a GPU, where reading a value waits for the device, only inside ``debug()``.
    """
    # Tested first: a compiler cannot trace the context variable of debug().
    if torch.compiler.is_compiling() or is_exporting():
        return False
    if not tensor.is_cpu and (not _checking_device_values.get() or tensor.device.type == "meta"):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not isinstance(tensor, torch._subclasses.FakeTensor)


@contextmanager
def debug() -> Iterator[None]:
    """Check the values of arguments on every device, even if the host has to wait for the device.

    Shapes and dtypes are always checked. Values (a target out of range, a distribution that does
    not sum to 1) are always checked on a CPU. On a GPU reading them would stall the stream, so they
    are checked only inside this context. While torch.compile traces there are no values to read; on
    a CPU, class ids are checked when the compiled code runs.

    Example:
        >>> import torch, lastlayer
        >>> with lastlayer.debug():
        ...     loss = lastlayer.sparsemax_loss(torch.zeros(1, 3), torch.tensor([2]))
    """
    token = _checking_device_values.set(True)
    try:
        yield
    finally:
        _checking_device_values.reset(token)


def debugging() -> bool:
    """Whether this call is inside ``debug()``."""
    return not torch.compiler.is_compiling() and _checking_device_values.get()


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable`` with types, for functions that torch.compile cannot trace.

    ``torch.compiler.disable`` imports the whole compiler, which takes seconds. So it is called only
    while compiling, when the compiler is loaded already.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        compiling = torch.compiler.is_compiling()
        run: Callable[_P, _R] = torch.compiler.disable(function) if compiling else function
        return run(*args, **kwargs)

    return call


def active_ddp() -> object | None:
    """The ``DistributedDataParallel`` module whose forward pass is running, or None."""
    ddp: object | None = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return ddp


def graph_is_kept() -> bool:
    """Whether the current backward pass was started with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, for example in a recomputed checkpoint."""
    return not torch.compiler.is_compiling() and backward_id() != -1


def backward_id() -> int:
    """The id of the current backward pass in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def is_plain_step() -> bool:
    """Whether this is a training step that runs once: not compiled, not in a checkpoint."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._current_graph_task_id() == -1
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def saves_tensors_through_hooks() -> bool:
    """Whether hooks for saved tensors are active, as inside a checkpoint."""
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None


def checkpoint_passes() -> tuple[list[object], list[object]]:
    """The checkpoints around this call: those in their first pass, and those being recomputed.

    A checkpoint is identified by an object that is the same in both passes: the frame object of
    ``torch.utils.checkpoint``, which its saved-tensor hooks hold, or, for reentrant checkpoints,
    the context of the autograd function that runs its function again in backward. The innermost
    checkpoint is first. This walks up the Python stack.
    """
    first: list[object] = []
    again: list[object] = []
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        code = caller.f_code
        if "frame" in code.co_freevars and _is_checkpoint(caller.f_locals.get("frame")):
            again.append(caller.f_locals["frame"])
        elif "ctx" in code.co_varnames:
            given = caller.f_locals.get("ctx")
            if isinstance(given, torch.autograd.function.FunctionCtx):
                (again if code.co_name == "backward" else first).append(given)
        caller = caller.f_back
    for pack, _ in _saved_tensors_hooks():
        held = [cell.cell_contents for cell in getattr(pack, "__closure__", None) or ()]
        first += [each for each in held if _is_checkpoint(each)]
    return first, again


def _is_checkpoint(value: Any) -> bool:
    return isinstance(value, torch.utils.checkpoint._CheckpointFrame)


def _saved_tensors_hooks() -> list[Any]:
    """All active hooks for saved tensors, the innermost first."""
    hooks: list[Any] = []
    autograd: Any = torch._C._autograd
    if autograd._saved_tensors_hooks_get_disabled_error_message() is None:
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


def refuse_second_derivatives(what: str, instead: str) -> None:
    """Raise an error in a backward pass with ``create_graph=True``.

    ``torch.autograd.function.once_differentiable`` raises no error if the upstream gradient is a
    constant.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"backward: {what} has no second derivatives, got create_graph=True; use {instead}"
        )


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context that disables autocast on the device of ``tensor``; free if autocast is off.

    Otherwise autocast would still round float32 operands after their dtypes have been chosen.
    """
    device = _device_type(tensor)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
