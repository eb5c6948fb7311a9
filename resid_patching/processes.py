"""Several processes that share one task, as `torchrun` and `accelerate launch` start them.

    team = processes.team()          # alone where nothing was launched
    for number in team.share(100):   # this process' part of 100
        ...
    rows = team.gather(rows)         # a list, in the order of the processes

Every process makes the same calls in the same order. Tensors are summed where they lie (gloo on a
CPU, nccl on GPUs), objects travel over gloo. A process that ends closes its connections, which
the others notice at once: their next call raises `LostProcessError`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from resid_patching.errors import LostProcessError, ResidPatchingError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# A lost process shows by its closed connection. This is for those that only wait, as the others
# do while the first reads its texts.
_LONGEST_WAIT = timedelta(hours=12)
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_store: Any = None


@dataclass(frozen=True)
class Team:
    """The processes of one launch, seen from one of them; alone, everything is a no-op.

    Attributes:
        rank: this process, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"process {self.rank} does not exist: there are {self.size}, counted from 0"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def share(self, n: int) -> range:
        """This process's part of the numbers below n: contiguous, in the order of the processes."""
        return range(-(-n * self.rank // self.size), -(-n * (self.rank + 1) // self.size))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the processes, in place, in its dtype; the same bits in each.

        Raises:
            LostProcessError: a process has ended.
        """
        if self.size > 1:
            from torch import distributed

            with self._named():
                distributed.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in their order; anything that can be pickled.

        Raises:
            LostProcessError: a process has ended.
        """
        if self.size == 1:
            return [value]
        from torch import distributed

        found: list[Any] = [None] * self.size
        with self._named():
            distributed.all_gather_object(found, value)
        return found

    def broadcast(self, value: T) -> T:
        """The value of the first process, sent to all; anything that can be pickled.

        Raises:
            LostProcessError: a process has ended.
        """
        if self.size == 1:
            return value
        from torch import distributed

        found = [value if self.is_first else None]
        with self._named():
            distributed.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """Does the work in the first process and sends the result, or the error, to all.

        Raises:
            LostProcessError: a process has ended.
        """
        if self.size == 1:
            return work()
        value = error = None
        if self.is_first:
            try:
                value = work()
            except Exception as raised:
                error = raised
        value, theirs = self.broadcast((value, _portable(error)))
        if theirs is not None:
            raise error or theirs
        return value  # type: ignore[return-value]

    def agree(self, error: Exception | None) -> None:
        """Raises in every process the error of the first that has one."""
        if self.size == 1 and error is not None:
            raise error
        for rank, theirs in enumerate(self.gather(_portable(error))):
            if theirs is not None:
                raise (error if rank == self.rank else None) or theirs

    def barrier(self) -> None:
        """Waits for all.

        Raises:
            LostProcessError: a process has ended.
        """
        self.gather(None)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Failures of torch's collectives as one error; our own pass."""
        from torch import OutOfMemoryError

        try:
            yield
        except OutOfMemoryError:
            raise
        except RuntimeError as error:
            atexit.unregister(_leave)  # nccl would wait for the process that was lost
            raise LostProcessError(
                f"process {self.rank} of {self.size}: another process has ended. Files that were "
                "saved are complete."
            ) from error


def _portable(error: Exception | None) -> Exception | None:
    """An error that can be sent to other processes."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a library's own error class raises
        return ResidPatchingError(f"{type(error).__name__}: {error}")


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return all(name in os.environ for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def team() -> Team:
    """The processes of this launch, or this one alone where there was none.

    The launch is joined at the first call, unless torch.distributed has been joined already. On
    GPUs, each process is given the one of its place on its machine as its current device.

    Raises:
        LostProcessError: the others did not come.
    """
    imported = sys.modules.get("torch.distributed")
    joined = imported is not None and imported.is_available() and imported.is_initialized()
    if not joined and not launched():
        return Team()

    from torch import distributed

    if not distributed.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with Team(rank, size)._named():
            _join(rank, size)
    return Team(distributed.get_rank(), distributed.get_world_size())


def _join(rank: int, size: int) -> None:
    global _store
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    devices = torch.cuda.device_count()
    if devices:
        torch.cuda.set_device(local % devices)
        # nccl refuses two processes on one GPU; gloo goes by way of the CPU.
        if devices >= int(os.environ.get("LOCAL_WORLD_SIZE", size)):
            backend = "cpu:gloo,cuda:nccl"
    _store, _, _ = next(rendezvous("env://", rank, size, timeout=_LONGEST_WAIT))
    distributed.init_process_group(
        backend, store=_store, rank=rank, world_size=size, timeout=_LONGEST_WAIT
    )
    atexit.register(_leave)


def _leave() -> None:
    """Ends gloo's threads while Python still runs.

    Such a thread lets go of the tensors of the last collective, for which it needs Python's lock.
    Where Python is already ending, that ends the thread instead, and the process by SIGABRT.
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def speaks() -> bool:
    """Whether this process reports that the launch has failed: the first to ask does."""
    if not launched():
        return True
    if _store is None:  # not joined: what fails now fails in all
        return os.environ["RANK"] == "0"
    try:
        return _store.add("resid_patching/said", 1) == 1
    except RuntimeError:  # the process that kept count has gone
        return True
