"""A head whose classes are sharded over the processes of a mesh."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._checks import check_choice, check_generator, check_ids, check_int, check_positive
from lastlayer._processes import (
    Shares,
    all_gathered,
    gathered,
    in_all,
    in_step,
    is_dtensor,
    named,
    sum_of_parts,
    summed,
)
from lastlayer._torch import eager, in_autocast_dtype
from lastlayer.fused.label_lists import check_lists, padded_lists
from lastlayer.heads import Head, MultiLabel, TopK
from lastlayer.heads.base import SavedModule, checked_draws
from lastlayer.heads.distributed import made_by_fsdp
from lastlayer.parallel.families import Family, family_of, swapped, with_option
from lastlayer.parallel.faults import check_agreement, check_alike
from lastlayer.parallel.prediction import Predictions
from lastlayer.parallel.tables import (
    cut,
    fill_from_counter,
    gathered_head,
    local_rows,
    read_tables,
    set_tensor,
    spread_tensor,
    value_of,
    write_tables,
)

ROWS = ("local", "shared")
ASSIGNMENTS = ("auto", "contiguous", "spread")
# Methods that the sharded head itself must not be asked for: most would fail, and save would write
# rows in the order of the shards.
_OF_WHOLE_HEADS = (
    "log_prob", "topk", "sample", "save", "predict", "probability", "audit", "relearn",
    "add_classes",
)  # fmt: skip
# What must be the same in all processes, or they would make other calls: bits of a number.
_MODES = {2: "recording of gradients", 4: "training mode", 8: "lists of classes or k", 16: "values"}


class ClassParallel(Head):
    r"""A head whose classes are sharded over processes: each process stores and scores a part.

    The loss and all gradients equal those of the head in one process with all rows. Parameters with
    one row per class become DTensors with ``Shard(0)``: a process stores only its part of them, of
    their gradients and of the optimiser's state. All other parameters are replicated, and their
    gradients are summed over processes.

    .. math:: \log \sum_c e^{\theta_c} = \log \sum_r e^{\ell_r}, \qquad
              \ell_r = \log \sum_{c \in r} e^{\theta_c}

    In training scores are never sent. A softmax exchanges one number per row, entmax the few
    candidates of each process, binary losses nothing. Hidden states are all-gathered, and their
    gradients are reduce-scattered. Sampled heads keep the rows in place and fetch the vectors of
    their draws.
    :func:`lastlayer.parallel.plan` computes the bytes.

    Choose it if the class vectors or their gradients are too large for one device, or if a step has
    fewer rows than there are classes, so that sending the rows is faster than reducing the gradient
    of all class vectors, as DDP does.

    **Averaging.** The loss covers the rows of all processes, and its gradients are not divided by
    the number of processes. DDP and FSDP2 *average* the gradients of the backbone over processes.
    With ``rows="local"`` and a backbone inside DDP or FSDP2, set
    ``hidden_grad_scale=number of processes``: the backbone then gets the gradient of one process
    with all rows.

    Every process must call the head and run backward in every step, even with an empty batch:
    the processes wait for each other.

    Args:
        head: the head, the same in all processes; the values of the first process are used. It
            becomes a submodule. Any number of classes works, even fewer than processes.
        mesh: a ``DeviceMesh`` of one dimension, such as ``mesh["classes"]`` of a larger one.
        rows: "local" if each process has its own rows, any number of them (data parallel);
            "shared" if all processes have the same rows (tensor parallel).
        assignment: how classes are assigned to processes. "contiguous" gives each process a range
            of class ids. "spread" puts neighbouring class ids into different processes, so that
            frequent classes, which often have the lowest ids, are not all in one. "auto" is
            "spread" for sampled heads and "contiguous" for all others.
        even_rows: promises, with ``rows="local"``, that all processes have the same number of rows,
            and that hidden needs a gradient in all of them or in none. This saves an exchange per
            step, for which the host waits on a GPU. Lengths of lists of labels or classes are still
            exchanged.
        hidden_grad_scale: factor of the gradient of hidden.

    Attributes:
        head: the head, with DTensors.
        classes: the class ids of this process, int64.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from lastlayer import heads, parallel
        >>> mesh = init_device_mesh("cpu", (4,))  # doctest: +SKIP
        >>> head = parallel.ClassParallel(heads.FullSoftmax(64, 1_000_000), mesh)  # doctest: +SKIP
        >>> head(hidden, target).backward()  # doctest: +SKIP
    """

    head: Any

    def __init__(
        self,
        head: Head,
        mesh: Any,
        *,
        rows: str = "local",
        assignment: str = "auto",
        even_rows: bool = False,
        hidden_grad_scale: float = 1.0,
    ) -> None:
        _check_mesh(mesh)
        torch.nn.Module.__init__(self)
        self.mesh, self.group, self.rows, self.even_rows = mesh, mesh.get_group(), rows, even_rows

        def checked() -> Family:
            _check_head(head, mesh)
            check_choice("rows", rows, ROWS)
            check_choice("assignment", assignment, ASSIGNMENTS)
            check_positive("hidden_grad_scale", hidden_grad_scale)
            return family_of(head, mesh, assignment)

        self._family = in_step(checked, self.group, mesh.device_type)
        self.in_features, self.n_classes, self.head = head.in_features, head.n_classes, head
        self.hidden_grad_scale = float(hidden_grad_scale)
        self._predictions = Predictions(self._family)
        self.assignment = "contiguous" if self._family.layout.step == 1 else "spread"
        check_alike(self)
        self._family.prepare()
        for name in self._family.names:
            spread = spread_tensor(value_of(head, name), mesh, self._layout_of(name))
            set_tensor(head, name, spread)
        _agree_on_others(head, self._family, mesh)
        head._is_spread = True
        for name in _OF_WHOLE_HEADS:
            if hasattr(head, name):
                head.__dict__[name] = partial(_refuse_on_shards, name)

    @classmethod
    def build(
        cls,
        kind: Any,
        *args: Any,
        mesh: Any,
        rows: str = "local",
        assignment: str = "auto",
        even_rows: bool = False,
        hidden_grad_scale: float = 1.0,
        seed: int = 0,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Build a head without ever storing it whole: each process initialises its own classes.

        Initial values depend on the seed and the class, not on the number of processes.

        Args:
            kind: the class of the head, such as ``heads.FullSoftmax``.
            args: positional arguments of its constructor.
            mesh: as in :class:`ClassParallel`.
            rows: as in :class:`ClassParallel`.
            assignment: as in :class:`ClassParallel`.
            even_rows: as in :class:`ClassParallel`.
            hidden_grad_scale: as in :class:`ClassParallel`.
            seed: seed of the initial values, and of the draws of a head with a ``seed`` of its own.
            device: device of the parameters; by default that of the mesh.
            options: keyword arguments of the head's constructor.
        """
        _check_mesh(mesh)

        def on_meta() -> Head:
            _check_kind(kind)
            own = {"seed": seed} if "seed" in kind.__signature__.parameters else {}
            head: Head = kind(*args, device="meta", **own, **options)
            _check_filled(head)
            return head

        head = in_step(on_meta, mesh.get_group(), mesh.device_type)
        device = torch.device(mesh.device_type) if device is None else torch.device(device)
        for name, each in head.named_buffers():
            # Tables of a sampler and counters have values already; they are synchronised below.
            if not each.is_meta:
                set_tensor(head, name, each.to(device))
        made = cls(
            head, mesh, rows=rows, assignment=assignment, even_rows=even_rows,
            hidden_grad_scale=hidden_grad_scale,
        )  # fmt: skip
        fill_from_counter(made.head, made._family, seed, device)
        return made

    def _layout_of(self, name: str) -> Any:
        return self._family.layout if self._family.by_class(name) else None

    @property
    def classes(self) -> Tensor:
        return self._family.classes

    @property
    def reduction(self) -> str:
        reduction: str = self.head.reduction
        return reduction

    @reduction.setter
    def reduction(self, reduction: str) -> None:
        self.head.reduction = reduction

    @property
    def ignore_index(self) -> int | None:  # type: ignore[override]
        index: int | None = self.head.ignore_index
        return index

    @property
    def chunk_rows(self) -> int | str:  # type: ignore[override]
        rows: int | str = getattr(self.head, "chunk_rows", "auto")
        return rows

    @eager
    def forward(
        self,
        hidden: Tensor,
        target: Tensor,
        offsets: Tensor | None = None,
        *,
        values: Tensor | None = None,
    ) -> Tensor:
        """The loss over the rows of all processes; with reduction "none" the losses of own rows.

        Args:
            hidden: ``(*batch, in_features)``.
            target: as the head takes it.
            offsets: offsets of concatenated lists of labels, for a head such as
                :class:`lastlayer.heads.MultiLabel`. The lists are padded to the longest one of all
                processes, for which the host waits.
            values: targets of the listed labels, for such a head.
        """
        met = self._meet(
            hidden, lambda: self._as_rows(hidden, target, offsets, values), values is not None
        )
        (rows, ids, extra), of = met.made, met.of
        if ids.dim() == 2:
            ids, extra = self._widened(ids, extra, met.width)
        check_agreement(self, rows, ids)
        rows = self._graded(rows, met)
        if self._family.moves_vectors(_counts(len(rows), of, self.mesh), ids.dim() == 2):
            loss = self._loss_of_own_rows(rows, ids, extra, of)
        elif of is None or of.processes == 1:
            loss = self._family.loss(rows, ids, **extra)
        else:
            every = {name: gathered(each, of) for name, each in extra.items()}
            loss = self._family.loss(gathered(rows, of), gathered(ids, of), **every)
            loss = _OwnRows.apply(loss, of) if self.reduction == "none" else loss
        return loss.reshape(hidden.shape[:-1]) if self.reduction == "none" else loss

    def _meet(
        self, hidden: Any, check: Callable[[], tuple[int, int | None, Any]], valued: bool = False
    ) -> "_Met":
        """Checks the arguments, and exchanges sizes and whether they are valid.

        Invalid arguments in one process, or another mode than in the others, raise an error in all,
        so that none waits for another that has raised, or for a call that another does not make.
        With shared rows nothing is exchanged, with even rows only the widths.

        Args:
            hidden: as given, unchecked.
            check: returns the number of rows, a width or None, and any checked arguments.
            valued: whether there are values.
        """
        wrong: Exception | None = None
        n, width, made = -1, None, None
        try:
            n, width, made = check()
        except Exception as error:  # noqa: BLE001 - raised again below
            wrong = error
        rank, processes = self.mesh.get_local_rank(), self.mesh.size()
        device = next(self.head.parameters()).device
        if self.rows == "shared" or self.even_rows:
            if wrong is not None:
                raise wrong
            if self.rows == "shared":
                return _Met(made, None, width or 0, False)
            if width is not None:
                # The numbers of rows are equal, the lengths of lists may differ.
                width = int(all_gathered(torch.tensor([width], device=device), self.group).max())
            return _Met(made, Shares((n,) * processes, rank, self.group, True), width or 0, False)
        recording = torch.is_grad_enabled()
        graded = isinstance(hidden, Tensor) and hidden.requires_grad and recording
        mode = graded + 2 * recording + 4 * self.head.training
        mode += 8 * (width is not None) + 16 * valued
        mine = torch.tensor([n, width or 0, mode], device=device)
        counts, widths, modes = all_gathered(mine, self.group).T.tolist()
        if wrong is not None:
            raise wrong
        if min(counts) < 0:
            others = [rank for rank, count in enumerate(counts) if count < 0]
            raise RuntimeError(
                "hidden, target: expected arguments that fit the head in every process, got others "
                f"in {named(others, self.group)}; see the error raised there"
            )
        for bit, what in _MODES.items():
            off = [rank for rank, each in enumerate(modes) if not each & bit]
            if 0 < len(off) < processes:
                raise RuntimeError(
                    f"ClassParallel: expected {what} in every process or in none, got none in "
                    f"{named(off, self.group)}"
                )
        of = Shares(tuple(counts), rank, self.group, False)
        return _Met(made, of, max(widths), any(each & 1 for each in modes))

    def _as_rows(
        self, hidden: Any, target: Any, offsets: Any, values: Any
    ) -> tuple[int, int | None, Any]:
        """Checked arguments as rows ``(n, in_features)`` and ids ``(n,)`` or ``(n, m)``."""
        self._check_hidden(hidden)
        batch = hidden.shape[:-1]
        for name, each in ("offsets", offsets), ("values", values):
            if each is not None and not isinstance(self.head, MultiLabel):
                raise TypeError(
                    f"{name}: expected None for a head without lists of labels, got {name} for "
                    f"{type(self.head).__name__}"
                )
        if offsets is not None:
            target, values = self._as_padded(hidden, target, offsets, values)
        if not isinstance(target, Tensor) or target.shape[: len(batch)] != batch:
            shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"target: expected shape {tuple(batch)} for hidden of shape {tuple(hidden.shape)}, "
                f"got {shape}"
            )
        target = check_ids("target", target, None, self.n_classes, self.ignore_index, like=hidden)
        n = batch.numel()
        rows, ids = in_autocast_dtype(hidden), target.reshape(n, *target.shape[len(batch) :])
        extra = {}
        if values is not None:
            if not isinstance(values, Tensor) or values.shape != target.shape:
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"values: expected the shape of target, {tuple(target.shape)}, got {got}"
                )
            extra["values"] = values.reshape(ids.shape)
        width = ids.shape[1] if ids.dim() == 2 else None
        return n, width, (rows.reshape(n, self.in_features), ids, extra)

    def _as_padded(
        self, hidden: Tensor, target: Any, offsets: Any, values: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Concatenated lists of labels and their values, padded to ``(*batch, longest)``."""
        head = self.head
        checked: tuple[Any, ...] = check_lists(
            hidden, head.n_classes, target, offsets, values, head.ignore_index, head.label_smoothing
        )
        positives, starts, values = checked
        ids, values = padded_lists(positives, starts, values, head.ignore_index)
        shape = *hidden.shape[:-1], ids.shape[1]
        return ids.reshape(shape), None if values is None else values.reshape(shape)

    def _widened(
        self, ids: Tensor, extra: dict[str, Tensor], width: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Lists padded to ``width``, the longest of all processes."""
        more = 0, width - ids.shape[1]
        padding = -100 if self.ignore_index is None else self.ignore_index
        return pad(ids, more, value=padding), {
            name: pad(each, more) for name, each in extra.items()
        }

    def _loss_of_own_rows(
        self, rows: Tensor, ids: Tensor, extra: dict[str, Tensor], of: Shares | None
    ) -> Tensor:
        """The loss without gathering rows: of own rows, or of a part of the shared ones."""
        head, n = self.head, len(rows)
        (size, *_), rank = _counts(n, of, self.mesh), self.mesh.get_local_rank()
        part = (
            slice(0, n) if of is not None else slice(min(n, size * rank), min(n, size * (rank + 1)))
        )
        some, targets = rows[part], ids[part]
        reduction = "none" if self.reduction == "none" else "sum"
        with (
            with_option(head, "reduction", reduction),
            swapped(head, self._family.shared_tensors()),
        ):
            loss: Tensor = head(some, targets, **{name: each[part] for name, each in extra.items()})
        if self.reduction == "none":
            if of is not None:
                return loss
            every = all_gathered(pad(loss.detach(), (0, size - len(loss))), self.group)
            spread: Tensor = _OfAllRows.apply(loss, every.flatten()[:n], part)
            return spread
        counted = torch.ones(targets.shape[0], dtype=torch.bool, device=ids.device)
        if head.ignore_index is not None:
            counted = targets != head.ignore_index
            counted = counted if counted.dim() == 1 else counted.any(-1)
        both = torch.stack([loss, counted.sum().to(loss.dtype)])
        total, rows_counted = sum_of_parts(both, self.group).unbind()
        return total / rows_counted.clamp(min=1.0) if self.reduction == "mean" else total

    @eager
    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities, see :meth:`Head.log_prob`.

        Differentiable once. The gradients are those of the sum of the processes' losses; with
        ``rows="shared"``, of the one loss that all processes compute alike. All processes must
        run backward.
        """

        def check() -> tuple[int, int | None, Any]:
            rows, chosen = self._check_rows(hidden), None
            shape: tuple[int, ...] = (*hidden.shape[:-1], self.n_classes)
            if classes is not None:
                chosen, shape = self.head._check_classes(hidden, classes)
            return len(rows), None if chosen is None else chosen.shape[1], (rows, chosen, shape)

        met = self._meet(hidden, check)
        (rows, chosen, shape), of = met.made, met.of
        rows = self._everyones(rows, met)
        if chosen is None:
            return self._predictions.log_probs(rows, of).reshape(shape)
        if of is None:
            return self._predictions.log_probs_of(rows, chosen).reshape(shape)
        own = chosen.shape[1]
        chosen = gathered(pad(chosen, (0, met.width - own)), of)
        found: Tensor = _OwnRows.apply(self._predictions.log_probs_of(rows, chosen), of)
        return found[:, :own].reshape(shape)

    @eager
    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k most probable classes, see :meth:`Head.topk`: each process sends its best k."""

        def check() -> tuple[int, int, Any]:
            rows = self._check_rows(hidden)
            return len(rows), self._check_k(k), rows

        met = self._meet(hidden, check)
        rows = self._everyones(met.made, met)
        values, classes = self._predictions.best(rows, met.width, met.of)
        shape = *hidden.shape[:-1], k
        return TopK(values[:, :k].reshape(shape), classes[:, :k].reshape(shape))

    @eager
    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws, see :meth:`Head.sample`.

        With ``rows="shared"`` the random numbers of the first process's generator are used.
        """

        def check() -> tuple[int, int, Any]:
            if type(self.head).sample is not Head.sample:
                # This head cannot sample, and raises an error that says why.
                type(self.head).sample(self.head, hidden, n_samples)
            rows, n = self._check_rows(hidden), check_int("n_samples", n_samples)
            check_generator(generator, hidden.device)
            made: dict[str, Any] = {"dtype": torch.float64, "device": rows.device}
            return len(rows), n, (rows, torch.rand((len(rows), n), generator=generator, **made))

        met = self._meet(hidden, check)
        (rows, uniform), of = met.made, met.of
        if of is None:
            first = self.mesh.get_local_rank() == 0
            uniform = summed(uniform if first else torch.zeros_like(uniform), self.group)
        else:
            uniform = gathered(pad(uniform, (0, met.width - uniform.shape[1])), of)
        rows = self._everyones(rows, met)
        drawn = self._predictions.draw(rows, uniform, of)[:, :n_samples]
        return checked_draws(drawn.reshape(*hidden.shape[:-1], n_samples))

    def _check_hidden(self, hidden: Any) -> None:
        if is_dtensor(hidden):
            raise TypeError(
                "hidden: expected the hidden states of this process as a plain tensor, got a "
                "DTensor; pass hidden.to_local(), or hidden.full_tensor() with rows='shared'"
            )
        self.head._check_hidden(hidden)

    def _everyones(self, rows: Tensor, met: "_Met") -> Tensor:
        """The rows of all processes."""
        rows = self._graded(in_autocast_dtype(rows), met)
        return rows if met.of is None else gathered(rows, met.of)

    def _graded(self, rows: Tensor, met: "_Met") -> Tensor:
        """Rows whose gradient is scaled, and summed over processes if rows are shared."""
        if not rows.requires_grad:
            # If another process needs the gradient of its rows, all processes take part in its
            # computation. Without this, the others would wait for this one in backward.
            return rows.detach().requires_grad_() if met.needs_grad else rows
        if self.hidden_grad_scale != 1.0:
            rows = _Scaled.apply(rows, self.hidden_grad_scale)
        return in_all(rows, self.group) if met.of is None else rows

    @torch.no_grad()
    def init_bias_from_counts(self, counts: Any, **given: Any) -> None:
        """Initialise biases from counts, as the head does; every process passes all counts."""
        if made_by_fsdp(type(self)):
            raise ValueError(
                "init_bias_from_counts: expected parameters sharded by class alone, got a head "
                "inside fully_shard; call it before fully_shard"
            )
        spread = {
            name: each
            for name, each in self.head.named_parameters()
            if name in self._family.names and each.dim() == 1
        }
        whole = {
            name: torch.empty(each.shape, dtype=each.dtype, device=each.device)
            for name, each in spread.items()
        }
        with swapped(self.head, whole):
            self.head.init_bias_from_counts(counts, **given)
        for name, values in whole.items():
            part = cut(values, self.mesh, self._layout_of(name))
            local_rows(spread[name]).copy_(part)

    def gather(self) -> Head:
        """A plain head with all classes in the first process; on the meta device in the others."""
        return gathered_head(self)

    def save(self, folder: str | Path) -> None:
        """Write the same files as ``head.save``; each process writes its own rows.

        All processes must call it, with a folder that all of them can access. ``Head.load`` reads
        it in one process, :meth:`load` in any number of processes.
        """
        write_tables(self, Path(folder))

    @classmethod
    def load(  # type: ignore[override]
        cls,
        folder: str | Path,
        mesh: Any,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Load a saved head and shard it; each process reads only its own rows.

        Args:
            folder: written by :meth:`save`, or by ``save`` of a plain head.
            mesh: as in :class:`ClassParallel`.
            device: device of the parameters; by default that of the mesh.
            options: keyword arguments of :class:`ClassParallel`.
        """
        _check_mesh(mesh)
        made: Self = read_tables(cls, Path(folder), mesh, device, options)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Meshes and process groups are not copied: the copy uses the same ones.
        memo |= {id(each): each for each in (self.mesh, self.group)}
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def config(self) -> dict[str, Any]:
        """The arguments of the head; ``cls(**config)`` constructs a plain one."""
        made: dict[str, Any] = self.head.config()
        return made

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, n_classes={self.n_classes}, "
            f"processes={self.mesh.size()}, rows={self.rows!r}, assignment={self.assignment!r}, "
            f"classes here: {len(self.classes)}"
        )


class _Met(NamedTuple):
    """What a process knows after the exchange at the start of a call."""

    made: Any
    """The checked arguments of this process."""
    of: Shares | None
    """The number of rows of each process; None if all processes have the same rows."""
    width: int
    """The largest width of all processes."""
    needs_grad: bool
    """Whether the rows of any process need a gradient; always False with shared or even rows."""


class _OwnRows(torch.autograd.Function):
    """Selects the results of this process's rows; backward gathers all gradients."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, of: Shares) -> Tensor:
        ctx.of = of
        return results[of.mine].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.of), None


class _OfAllRows(torch.autograd.Function):
    """Losses of all rows; backward returns the gradient of the part computed here."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, every: Tensor, part: slice) -> Tensor:
        ctx.part = part
        return every.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.part], None, None


class _Scaled(torch.autograd.Function):
    """Multiplies the gradient by a constant."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _refuse_on_shards(name: str, *_: Any, **__: Any) -> Any:
    instead = f"ClassParallel.{name}" if hasattr(Head, name) else f"ClassParallel.gather().{name}"
    raise RuntimeError(
        f"{name}: expected a head with all classes, got the sharded one inside a ClassParallel; "
        f"use {instead}"
    )


def _counts(n: int, of: Shares | None, mesh: Any) -> tuple[int, ...]:
    """Number of rows of each process; of shared rows, the number that each one takes."""
    return (-(-n // mesh.size()),) * mesh.size() if of is None else of.counts


def _check_head(head: Any, mesh: Any) -> None:
    if isinstance(head, ClassParallel):
        raise TypeError("head: expected a plain head, got a ClassParallel")
    if isinstance(head, SavedModule) and not isinstance(head, Head):
        raise TypeError(
            f"head: expected a head with one vector per class, got {type(head).__name__}, which "
            "has too few parameters to shard by class; use DistributedDataParallel or fully_shard"
        )
    if not isinstance(head, Head):
        raise TypeError(
            f"head: expected a lastlayer head, got {type(head).__name__}; FullSoftmax.from_linear "
            "converts an nn.Linear"
        )
    sharded = [name for name, each in head.named_parameters() if is_dtensor(each)]
    if sharded:
        raise ValueError(
            f"head: expected plain parameters, got a DTensor in {sharded[0]}; call "
            "ClassParallel(head, mesh) before fully_shard"
        )
    device = next(head.parameters()).device.type
    if device not in ("meta", mesh.device_type):
        raise ValueError(
            f"mesh: expected {device} devices, the device of the head, got {mesh.device_type}; "
            "move the head with .to(device)"
        )


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Head)):
        raise TypeError(f"kind: expected a Head subclass, got {kind!r}")


def _check_mesh(mesh: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a DeviceMesh, got {type(mesh).__name__}; create one with "
            'torch.distributed.device_mesh.init_device_mesh("cuda", (n,))'
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or "its dimensions"
        raise ValueError(
            f"mesh: expected one dimension, got {mesh.ndim}; select one of {names}, such as "
            'mesh["classes"]'
        )


def _check_filled(head: Head) -> None:
    """Tables of samplers must have values: no process could recompute them."""
    for name, each in head.named_buffers():
        if name.startswith("sampler.") and each.is_meta:
            raise ValueError(
                f"sampler: expected tables with values, got {name} on the meta device; load them "
                "from a folder with ClassParallel.load"
            )


def _agree_on_others(head: Head, family: Family, mesh: Any) -> None:
    """Broadcasts the parameters and buffers that are not sharded from the first process.

    If a head's parameters are on the meta device, its buffers may be on another device than that
    of the mesh. They are moved to it first, since the group can only send tensors from there.
    """
    names, group, device = {*family.names}, mesh.get_group(), mesh.device_type
    first = torch.distributed.get_global_rank(group, 0)
    for name, each in (*head.named_parameters(), *head.named_buffers()):
        if name not in names and not each.is_meta:
            there = each.detach()
            if there.device.type != device:
                there = there.to(device)
                set_tensor(head, name, there)
            torch.distributed.broadcast(there, first, group=group)
