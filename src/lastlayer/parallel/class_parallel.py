"""A head whose classes are spread over the processes of a mesh."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer._checks import check_choice, check_generator, check_ids, check_int, check_positive
from lastlayer._processes import Shares, all_gathered, gathered, in_all, is_dtensor, summed
from lastlayer._torch import eager, in_autocast_dtype, without_autocast
from lastlayer.fused.prediction import drawn_by, top_classes
from lastlayer.fused.scores import row_chunks
from lastlayer.heads import Head, TopK
from lastlayer.heads.base import SavedModule, checked_draws
from lastlayer.parallel.families import Family, family_of, swapped
from lastlayer.parallel.faults import agree, named_errors
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
# Numbers held for each row and class of this process in predictions.
_COPIES = 4.0


class ClassParallel(Head):
    r"""A head with its classes spread over processes, each of which has a range of them.

    The loss and all gradients are those of the head in one process with all rows. Parameters with
    a row per class are DTensors with ``Shard(0)``: no process has more than its part of them, of
    their gradients and of an optimiser's state. The others are the same in all processes, and
    their gradients are summed.

    .. math:: \log \sum_c e^{\theta_c} = \log \sum_r e^{\ell_r}, \qquad
              \ell_r = \log \sum_{c \in r} e^{\theta_c}

    What travels is small: for a softmax one number per row, for entmax the few candidates of each
    process, for binary losses nothing; hidden states go to all processes, and their gradients
    come back. Sampled heads leave rows where they are, and ask for the vectors of their draws.
    :func:`lastlayer.parallel.plan` counts it.

    Choose it where the class vectors, or their gradients, are too large for one device; or where
    fewer rows are in a step than there are classes, and reducing the gradient of all class vectors,
    as DDP does, takes longer than sending the rows.

    **Averaging.** The loss is that of the rows of all processes, and gradients are its derivatives,
    divided by nothing. DDP and FSDP2 *average* the gradients of a body over its processes; with
    ``rows="local"`` and a body inside of one of these give
    ``hidden_grad_scale=number of processes``, and the body has the gradient of one process with all
    rows.

    Every process has to call the head in every step, if with an empty batch, and backward too:
    they wait for each other.

    Args:
        head: the head, the same in all processes; the values of the first one count. It becomes a
            part of this module. Its classes may be any number, also fewer than processes.
        mesh: a ``DeviceMesh`` of one dimension, such as ``mesh["classes"]`` of a larger one.
        rows: "local" where each process has its own rows, any number of them: data parallel.
            "shared" where all have the same: tensor parallel.
        assignment: which classes a process has. "contiguous" is a range of them. "spread" is every
            so-manieth, so that frequent classes, which mostly come first, are not all in one
            process. "auto" spreads those of sampled heads.
        even_rows: promises that all processes have the same number of rows with ``rows="local"``;
            nothing is asked then, which on a GPU is a wait per step.
        hidden_grad_scale: what the gradient of hidden is multiplied by.

    Attributes:
        head: the head, with DTensors.
        classes: the class ids that this process has, int64.

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
        _check_head(head)
        _check_mesh(mesh, head)
        check_choice("rows", rows, ROWS)
        check_choice("assignment", assignment, ASSIGNMENTS)
        torch.nn.Module.__init__(self)
        self.in_features, self.n_classes = head.in_features, head.n_classes
        self.mesh, self.group, self.rows, self.even_rows = mesh, mesh.get_group(), rows, even_rows
        self.hidden_grad_scale = check_positive("hidden_grad_scale", hidden_grad_scale)
        self.head = head
        self._family = family_of(head, mesh, assignment)
        self.assignment = "contiguous" if self._family.layout.step == 1 else "spread"
        for name in self._family.names:
            spread = spread_tensor(value_of(head, name), mesh, self._layout_of(name))
            set_tensor(head, name, spread)
        _agree_on_others(head, self._family, self.group)
        head._is_spread = True

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
        """A head that no process ever has as a whole: each makes the rows of its own classes.

        Fresh values depend on the seed and on the class, not on the number of processes.

        Args:
            kind: the class of the head, such as ``heads.FullSoftmax``.
            args: of its constructor.
            mesh: as of :class:`ClassParallel`.
            rows: the same.
            assignment: the same.
            even_rows: the same.
            hidden_grad_scale: the same.
            seed: of the initial values.
            device: of the parameters; that of the mesh otherwise.
            options: of the constructor of the head, by name.
        """
        _check_kind(kind)
        head: Head = kind(*args, device="meta", **options)
        made = cls(
            head, mesh, rows=rows, assignment=assignment, even_rows=even_rows,
            hidden_grad_scale=hidden_grad_scale,
        )  # fmt: skip
        device = torch.device(mesh.device_type) if device is None else torch.device(device)
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
    def forward(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        """The loss of the rows of all processes, the same in each; with "none" of its own rows.

        Args:
            hidden: ``(*batch, in_features)``.
            target: as the head takes it.
            given: what else the head takes by name.
        """
        with named_errors(self.group):
            rows, ids, extra, of = self._met(hidden, target, given)
            if self.hidden_grad_scale != 1.0 and rows.requires_grad:
                rows = _Scaled.apply(rows, self.hidden_grad_scale)
            each = -(-len(rows) // self.mesh.size())
            counts = (each,) * self.mesh.size() if of is None else of.counts
            if self._family.moves_vectors(counts, ids.dim() == 2):
                loss = self._loss_of_own_rows(rows, ids, extra, of)
            elif of is None or of.processes == 1:
                rows = in_all(rows, self.group) if of is None and rows.requires_grad else rows
                loss = self._family.loss(rows, ids, **extra)
            else:
                every = {name: gathered(each, of) for name, each in extra.items()}
                loss = self._family.loss(gathered(rows, of), gathered(ids, of), **every)
                loss = _OwnRows.apply(loss, of) if self.reduction == "none" else loss
        return loss.reshape(hidden.shape[:-1]) if self.reduction == "none" else loss

    def _met(
        self, hidden: Any, target: Any, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Shares | None]:
        """Rows, targets and what else there is of each row, and how many rows each process has.

        What is wrong in one process is told to all: none waits for another that has raised.
        """
        wrong: Exception | None = None
        rows = ids = torch.empty(0, 0)
        extra: dict[str, Tensor] = {}
        try:
            rows, ids, extra = self._as_rows(hidden, target, given)
        except (TypeError, ValueError, RuntimeError) as error:
            wrong = error
        if self.rows == "shared" or self.even_rows:
            if wrong is not None:
                raise wrong
            of = None
            if self.rows == "local":
                of = Shares(
                    (len(rows),) * self.mesh.size(), self.mesh.get_local_rank(), self.group, True
                )
            agree(self, rows, ids, shared=self.rows == "shared")
            return rows, ids, extra, of
        width = ids.shape[1] if ids.dim() == 2 else 0
        device = next(self.head.parameters()).device
        mine = torch.tensor([-1 if wrong is not None else len(rows), width], device=device)
        told = all_gathered(mine, self.group)
        counts, widths = told.T.tolist()
        if wrong is not None:
            raise wrong
        if min(counts) < 0:
            others = [rank for rank, count in enumerate(counts) if count < 0]
            raise RuntimeError(
                "hidden, target: expected arguments that fit the head in every process, got others "
                f"in {_ranks(others)}, which say what is wrong with them"
            )
        of = Shares(tuple(counts), self.mesh.get_local_rank(), self.group, False)
        if ids.dim() == 2:
            ids, extra = self._widened(ids, extra, max(widths))
        agree(self, rows, ids, shared=False)
        return rows, ids, extra, of

    def _as_rows(
        self, hidden: Any, target: Any, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Checked arguments as rows ``(n, in_features)`` and ids ``(n,)`` or ``(n, m)``."""
        self.head._check_hidden(hidden)
        if given.get("offsets") is not None:
            raise ValueError(
                "offsets: expected None where labels are spread over processes, got some; pad the "
                "lists with ignore_index"
            )
        batch = hidden.shape[:-1]
        if not isinstance(target, Tensor) or tuple(target.shape[: len(batch)]) != tuple(batch):
            shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"target: expected shape {tuple(batch)} for hidden of shape {tuple(hidden.shape)}, "
                f"got {shape}"
            )
        n, rest = batch.numel(), target.shape[len(batch) :]
        ids = target.reshape(n, *rest).long()
        ids = check_ids("target", ids, None, self.n_classes, self.ignore_index, like=hidden)
        extra = {
            name: each.reshape(n, *each.shape[len(batch) :])
            for name, each in given.items()
            if each is not None
        }
        return in_autocast_dtype(hidden).reshape(n, self.in_features), ids, extra

    def _widened(
        self, ids: Tensor, extra: dict[str, Tensor], width: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Lists as long as the longest of all processes."""
        more = width - ids.shape[1]
        if not more:
            return ids, extra
        padding = -100 if self.ignore_index is None else self.ignore_index
        ids = torch.nn.functional.pad(ids, (0, more), value=padding)
        return ids, {name: torch.nn.functional.pad(each, (0, more)) for name, each in extra.items()}

    def _loss_of_own_rows(
        self, rows: Tensor, ids: Tensor, extra: dict[str, Tensor], of: Shares | None
    ) -> Tensor:
        """Of rows that stay where they are: this process's own, or its part of shared ones."""
        head, n = self.head, len(rows)
        part = slice(0, n)
        if of is None:
            rows = in_all(rows, self.group) if rows.requires_grad else rows
            size, rank = -(-n // self.mesh.size()), self.mesh.get_local_rank()
            part = slice(min(n, size * rank), min(n, size * (rank + 1)))
        some, targets = rows[part], ids[part]
        extra = {name: each[part] for name, each in extra.items()}
        with _reduced_by(head, "none" if self.reduction == "none" else "sum"):
            loss: Tensor = head(some, targets, **extra)
        if self.reduction == "none":
            if of is not None:
                return loss
            size = -(-n // self.mesh.size())
            every = all_gathered(
                torch.nn.functional.pad(loss.detach(), (0, size - len(loss))), self.group
            )
            every = every.flatten()[:n]
            return _InPlace.apply(loss, every, part)  # type: ignore[no-any-return]
        counted = torch.ones(targets.shape[0], dtype=torch.bool, device=ids.device)
        if head.ignore_index is not None:
            valid = targets != head.ignore_index
            counted = valid if valid.dim() == 1 else valid.any(-1)
        both = summed(torch.stack([loss.detach(), counted.sum().to(loss.dtype)]), self.group)
        if self.reduction == "sum":
            return loss + (both[0] - loss.detach())
        share = 1.0 / both[1].clamp(min=1.0)
        return loss * share + (both[0] - loss.detach()) * share

    @eager
    @torch.no_grad()
    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities, as of :meth:`Head.log_prob`; no gradient is recorded."""
        with named_errors(self.group):
            return self._log_prob(hidden, classes)

    def _log_prob(self, hidden: Tensor, classes: Tensor | None) -> Tensor:
        self.head._check_hidden(hidden)
        shape: tuple[int, ...] = (*hidden.shape[:-1], self.n_classes)
        chosen = None
        if classes is not None:
            chosen, shape = self.head._check_classes(hidden, classes)
        rows, of = self._everyones(hidden)
        mine = slice(0, len(rows)) if of is None else of.mine
        found = []
        if chosen is None:
            for part, logs in self._in_chunks(rows):
                every = self._all_columns(logs)
                found.append(every[_overlap(part, mine)])
            return torch.cat(found).reshape(shape)
        if of is not None:
            widths = all_gathered(torch.tensor([chosen.shape[1]], device=rows.device), self.group)
            chosen = torch.nn.functional.pad(chosen, (0, int(widths.max()) - chosen.shape[1]))
            chosen = gathered(chosen, of)
        for part, logs in self._in_chunks(rows):
            column = self._columns_of(chosen[part])
            values = logs.new_zeros(column.shape)
            if logs.shape[1]:
                values = torch.where(column < 0, 0.0, logs.gather(-1, column.clamp(min=0)))
            found.append(summed(values, self.group)[_overlap(part, mine)])
        made = torch.cat(found)
        return made[
            :, : shape[-1] if classes is not None and classes.dim() == hidden.dim() else 1
        ].reshape(shape)

    @eager
    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k most probable classes, as of :meth:`Head.topk`: each process sends its best k."""
        with named_errors(self.group):
            self.head._check_hidden(hidden)
            k = self._check_k(k)
            rows, of = self._everyones(hidden)
            mine = slice(0, len(rows)) if of is None else of.mine
            best: list[tuple[Tensor, Tensor]] = []
            for part, logs in self._in_chunks(rows):
                some = _overlap(part, mine)
                values, classes = self._merged(logs, k)
                best.append((values[some], classes[some]))
            shape = *hidden.shape[:-1], k
            values, classes = (torch.cat(each).reshape(shape) for each in zip(*best, strict=True))
        return TopK(values, classes)

    def _merged(self, logs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of all processes; of equal ones the lower class first."""
        order, some = self._by_id, min(k, logs.shape[1])
        values = logs.new_full((len(logs), k), -torch.inf)
        classes = torch.full(values.shape, self.n_classes, device=logs.device)
        if some:
            values[:, :some], columns = top_classes(logs[:, order], some)
            classes[:, :some] = self.classes[order][columns]
        values, classes = (
            all_gathered(each, self.group).transpose(0, 1).flatten(1) for each in (values, classes)
        )
        by_id = classes.argsort(-1)
        values, columns = top_classes(values.gather(-1, by_id), k)
        return values, classes.gather(-1, by_id).gather(-1, columns)

    @eager
    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws, as of :meth:`Head.sample`.

        With rows that all processes have, the numbers of the first one's generator count.
        """
        if type(self.head).sample is not Head.sample:
            self.head.sample(hidden, n_samples)
        with named_errors(self.group):
            self.head._check_hidden(hidden)
            n_samples = check_int("n_samples", n_samples)
            check_generator(generator, hidden.device)
            n = hidden.shape[:-1].numel()
            uniform = torch.rand(
                (n, n_samples), generator=generator, dtype=torch.float64, device=hidden.device
            )
            rows, of = self._everyones(hidden)
            if of is None:
                first = self.mesh.get_local_rank() == 0
                uniform = summed(uniform if first else torch.zeros_like(uniform), self.group)
            else:
                uniform = gathered(uniform, of)
            mine = slice(0, len(rows)) if of is None else of.mine
            drawn = [
                self._drawn(logs, uniform[part])[_overlap(part, mine)]
                for part, logs in self._in_chunks(rows)
            ]
            return checked_draws(torch.cat(drawn).reshape(*hidden.shape[:-1], n_samples))

    def _drawn(self, logs: Tensor, uniform: Tensor) -> Tensor:
        """By the cumulated probabilities of processes, and of the classes in one of them."""
        none = logs.new_full(logs.shape[:1], -torch.inf)
        own = logs.logsumexp(-1) if logs.shape[1] else none
        masses = all_gathered(own.double().exp(), self.group)
        ends = masses.cumsum(0)
        rank, number = self.mesh.get_local_rank(), uniform * ends[-1].unsqueeze(-1)
        begin = (ends[rank] - masses[rank]).unsqueeze(-1)
        here = (number >= begin) & (number < ends[rank].unsqueeze(-1))
        if rank == self.mesh.size() - 1:
            here |= number >= ends[rank].unsqueeze(-1)
        drawn = torch.full(uniform.shape, -1, device=uniform.device)
        if logs.shape[1]:
            inside = ((number - begin) / masses[rank].unsqueeze(-1)).clamp(0.0, 1.0 - 2**-53)
            column = drawn_by(logs - own.unsqueeze(-1), torch.where(here, inside, 0.0))
            drawn = torch.where(here & (column >= 0), self.classes[column.clamp(min=0)], -1)
        return summed(drawn + 1, self.group) - 1

    def _everyones(self, hidden: Tensor) -> tuple[Tensor, Shares | None]:
        """The rows of all processes, and how many each has; None where all have the same."""
        rows = in_autocast_dtype(hidden).reshape(-1, self.in_features).detach()
        if self.rows == "shared":
            return rows, None
        if self.even_rows:
            counts = [len(rows)] * self.mesh.size()
        else:
            told = all_gathered(torch.tensor([len(rows)], device=rows.device), self.group)
            counts = told.flatten().tolist()
        of = Shares(tuple(counts), self.mesh.get_local_rank(), self.group, self.even_rows)
        return gathered(rows, of), of

    def _in_chunks(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some rows, the same in all processes, and log-probabilities of this process's classes."""
        most = -(-self.n_classes // self.mesh.size())
        with without_autocast(rows):
            for part in row_chunks(rows, most, self.chunk_rows, _COPIES):
                yield part, self._family.log_probs(rows[part])

    @property
    def _by_id(self) -> Tensor:
        """This process's columns in the order of their classes."""
        known = self.__dict__.get("_order_of_columns")
        if known is None or known.device != self.classes.device:
            known = self.__dict__["_order_of_columns"] = self.classes.argsort()
        return known

    def _columns_of(self, classes: Tensor) -> Tensor:
        """Columns of this process, negative for classes of others."""
        order = self._by_id
        if not len(order):
            return torch.full_like(classes, -1)
        sorted_ids = self.classes[order]
        place = torch.searchsorted(sorted_ids, classes.contiguous()).clamp(max=len(order) - 1)
        return torch.where(sorted_ids[place] == classes, order[place], -1)

    def _all_columns(self, logs: Tensor) -> Tensor:
        """Log-probabilities of all classes, in their order, from those of each process."""
        sizes = all_gathered(torch.tensor([logs.shape[1]], device=logs.device), self.group)
        most = int(sizes.max())
        padded = logs.new_full((len(logs), most), -torch.inf)
        padded[:, : logs.shape[1]] = logs
        ids = torch.full((most,), self.n_classes, device=logs.device)
        ids[: logs.shape[1]] = self.classes
        made = logs.new_empty(len(logs), self.n_classes + 1)
        every, places = all_gathered(padded, self.group), all_gathered(ids, self.group)
        for some, columns in zip(every, places, strict=True):
            made[:, columns] = some
        return made[:, : self.n_classes]

    @torch.no_grad()
    def init_bias_from_counts(self, counts: Any, **given: Any) -> None:
        """Start at the class frequencies; as of the head. Every process has all counts."""
        spread = {name: value_of(self.head, name) for name in self._family.names}
        whole = {
            name: torch.empty(each.shape, dtype=each.dtype, device=each.device)
            for name, each in spread.items()
            if each.dim() == 1
        }
        with swapped(self.head, whole):
            self.head.init_bias_from_counts(counts, **given)
        for name, values in whole.items():
            part = cut(values, self.mesh, self._layout_of(name))
            local_rows(spread[name]).copy_(part)

    def gather(self) -> Head:
        """One head with all classes: in the first process; in the others on the meta device."""
        return gathered_head(self)

    def save(self, folder: str | Path) -> None:
        """Write what ``head.save`` would write; each process writes its rows into one file.

        All processes call it, with a folder that all of them see. It opens with ``Head.load`` in
        one process, and with :meth:`load` in any number.
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
        """A saved head over the processes of a mesh, each of which reads its own rows.

        Args:
            folder: as :meth:`save` wrote it, or ``save`` of a plain head.
            mesh: as of :class:`ClassParallel`.
            device: of the parameters; that of the mesh otherwise.
            options: of :class:`ClassParallel`, by name.
        """
        made: Self = read_tables(cls, Path(folder), mesh, device, options)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Processes are not copied: the copy meets the same ones.
        memo |= {id(each): each for each in (self.mesh, self.group)}
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def config(self) -> dict[str, Any]:
        """The arguments of the head; ``cls(**config)`` makes a plain one."""
        made: dict[str, Any] = self.head.config()
        return made

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, n_classes={self.n_classes}, "
            f"processes={self.mesh.size()}, rows={self.rows!r}, assignment={self.assignment!r}, "
            f"classes here: {len(self.classes)}"
        )


class _OwnRows(torch.autograd.Function):
    """The losses of this process's rows, from those of all; gradients of all rows are gathered."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, of: Shares) -> Tensor:
        ctx.of = of
        return losses[of.mine].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.of), None


class _InPlace(torch.autograd.Function):
    """Losses of all rows, of which this process computed a part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, every: Tensor, part: slice) -> Tensor:
        ctx.part = part
        return every.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.part], None, None


class _Scaled(torch.autograd.Function):
    """Hidden states whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@contextmanager
def _reduced_by(head: Any, reduction: str) -> Iterator[None]:
    before, head.reduction = head.reduction, reduction
    try:
        yield
    finally:
        head.reduction = before


def _overlap(part: slice, mine: slice) -> slice:
    """What of some rows is this process's, counted from the first of them."""
    first = min(max(part.start or 0, mine.start), part.stop)
    last = max(first, min(part.stop, mine.stop))
    return slice(first - (part.start or 0), last - (part.start or 0))


def _ranks(ranks: list[int]) -> str:
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {ranks}"


def _check_head(head: Any) -> None:
    if isinstance(head, ClassParallel):
        raise TypeError("head: expected a plain head, got a ClassParallel")
    if isinstance(head, SavedModule) and not isinstance(head, Head):
        raise TypeError(
            f"head: expected one with a vector per class, got {type(head).__name__}, whose "
            "parameters are few: every process has all of them, inside of DistributedDataParallel "
            "or fully_shard"
        )
    if not isinstance(head, Head):
        raise TypeError(
            f"head: expected a lastlayer head, got {type(head).__name__}; FullSoftmax.from_linear "
            "makes one of an nn.Linear"
        )
    sharded = [name for name, each in head.named_parameters() if is_dtensor(each)]
    if sharded:
        raise ValueError(
            f"head: expected one with plain parameters, got a DTensor in {sharded[0]}; make "
            "ClassParallel(head, mesh) before fully_shard"
        )


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Head)):
        raise TypeError(f"kind: expected a class of heads, got {kind!r}")


def _check_mesh(mesh: Any, head: Head) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a DeviceMesh, got {type(mesh).__name__}; "
            'torch.distributed.device_mesh.init_device_mesh("cuda", (n,)) makes one'
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or "its dimensions"
        raise ValueError(
            f"mesh: expected one dimension, got {mesh.ndim}; give one of {names}, such as "
            'mesh["classes"]'
        )
    device = next(head.parameters()).device.type
    if device not in ("meta", mesh.device_type):
        raise ValueError(
            f"mesh: expected one of {device} devices, as the parameters of the head are, got one "
            f"of {mesh.device_type}; move the head with .to(device)"
        )


def _agree_on_others(head: Head, family: Family, group: Any) -> None:
    """Parameters and buffers that are not spread start as those of the first process."""
    names = {*family.names}
    first = torch.distributed.get_global_rank(group, 0)
    for name, each in (*head.named_parameters(), *head.named_buffers()):
        if name not in names and not each.is_meta:
            torch.distributed.broadcast(each.detach(), first, group=group)
