"""The running job: which process is which device of the plan, and the groups over which it talks."""

from __future__ import annotations

import atexit
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetpipe.documents.cluster import Cluster, Node
from hetpipe.files.messages import InputError
from hetpipe.processes.cards import begin_backward, check_card
from hetpipe.processes.environment import NODE, check_environment, launched, long_timeout, own_node, place, step_timeout
from hetpipe.processes.peers.differences import check_alike
from hetpipe.processes.pulse import peers_named, start_pulse, watches_itself
from hetpipe.processes.rendezvous import leave, meet_ranks
from hetpipe.processes.whereabouts import waiting

T = TypeVar("T")


@contextmanager
def _with_others() -> Iterator[None]:
    """Messages to and from other ranks: this one waits for them, and who breaks the connection, or is late, is named."""
    with waiting(), peers_named():
        yield


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all. `rank_of` maps device ids to global ranks; `device_id` is this process's (None: it has no part in
    the cluster); `hosts` are the host names of all ranks; `control` is a CPU group for small messages over `ranks`; `slow` is
    another, for what may take long (None: `control` is one)."""

    rank: int
    size: int
    device_id: str | None
    rank_of: Mapping[str, int]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    control: dist.ProcessGroup | None
    slow: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == min(self.ranks)

    def sum(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> list[float]:
        """Element-wise sum over the group's processes: the same bits everywhere."""
        tensor = torch.tensor(list(values), dtype=dtype)
        if len(self.ranks) > 1:
            with _with_others():
                dist.all_reduce(tensor, group=self.control)
        result: list[float] = tensor.tolist()
        return result

    def sum_later(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """What `sum` gives, as a function that waits for it: it is added up meanwhile."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self.control, async_op=True) if len(self.ranks) > 1 else None

        def result() -> list[float]:
            if work is not None:
                work.wait()
            found: list[float] = tensor.tolist()
            return found

        return result

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in rank order, on every process."""
        if len(self.ranks) == 1:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        with _with_others():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def first(self, value: Any) -> Any:
        """The main process's value on every process."""
        if len(self.ranks) == 1:
            return value
        values = [value]
        with _with_others():
            dist.broadcast_object_list(values, src=min(self.ranks), group=self.control)
        return values[0]

    def on_main(self, action: Callable[[], object]) -> None:
        """Done by the main process while the others wait; what it raises, all raise."""
        error: Exception | None = None
        if self.is_main:
            try:
                action()
            except Exception as raised:
                error = raised
        error = self.first(error)
        if error is not None:
            raise error

    def together(self, action: Callable[[], T]) -> T:
        """Done by every process; its own value. What one of them raises, all raise, where several do that of the lowest rank."""
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(action())
        except Exception as raised:
            error = raised
        first = next((found for found in self.gather(error) if found is not None), None)
        if first is not None:
            raise first
        return result[0]

    def barrier(self) -> None:
        """Wait for all."""
        self.sum([0.0])

    def patiently(self) -> World:
        """This world, whose messages may take as long as loading and saving do."""
        return replace(self, control=self.slow or self.control)

    def require(self, device_ids: Sequence[str]) -> World:
        """This world, if it has a process for each of these devices; else an InputError."""
        check_devices(device_ids, self.rank_of)
        return self

    def restrict(self, device_ids: Sequence[str]) -> World:
        """The part of this world that runs these devices; every process must call it."""
        self.require(device_ids)
        ranks = tuple(sorted({self.rank_of[d] for d in device_ids}))
        control, slow = (
            dist.new_group(list(ranks), backend="gloo", timeout=timeout) if len(ranks) > 1 else None
            for timeout in (step_timeout(), long_timeout())
        )
        return World(
            rank=self.rank,
            size=self.size,
            device_id=self.device_id if self.rank in ranks else None,
            rank_of={d: self.rank_of[d] for d in device_ids},
            ranks=ranks,
            hosts=self.hosts,
            control=control,
            slow=slow,
        )

    def close(self) -> None:
        """End the groups that `restrict` has made. Every rank of it calls it, when it has done with all messages in them."""
        for group in (self.control, self.slow):
            if group is not None:
                dist.destroy_process_group(group)


def alone() -> World:
    """A world of this process only, which needs no process group."""
    return World(rank=0, size=1, device_id=None, rank_of={}, ranks=(0,), control=None)


def check_devices(device_ids: Sequence[str], rank_of: Mapping[str, int]) -> None:
    """InputError if a plan uses a device that no process of the job drives."""
    missing = [d for d in device_ids if d not in rank_of]
    if missing:
        raise InputError(
            f"the plan uses {missing}, but this job has only the devices {sorted(rank_of)}; start one process per device"
        )


def connect(*, use_cuda: bool, watched: bool = True, told: Mapping[str, Any] | None = None) -> None:
    """Join the process group that torchrun or `hetpipe train` prepared (or a world of one); gloo, with NCCL where there
    are GPUs. A group that is there already must have what the devices need. `watched`: ranks give signs of life, and must have
    the same versions and have been `told` the same (see `check_alike`). Collective."""
    _connect(use_cuda=use_cuda, watched=watched)
    if watched:
        check_alike(told or {})


def _connect(*, use_cuda: bool, watched: bool) -> None:
    if use_cuda and launched():
        _take_gpu()
    if use_cuda and torch.cuda.is_available():
        check_card(torch.cuda.current_device())
        begin_backward(torch.device("cuda", torch.cuda.current_device()))
    if dist.is_initialized():
        _check_group(use_cuda=use_cuda)
        return
    # Its functions keep, as their default, the group that there is when they are imported, which then never ends.
    import_module("torch.distributed.nn.functional")

    backends = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    check_environment()
    if launched():
        store, rank, size = meet_ranks(long_timeout())
        if watched and watches_itself():
            start_pulse(store, rank, size, 2 * step_timeout().total_seconds())
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=long_timeout())
    atexit.unregister(leave)
    atexit.register(leave)  # once


def _take_gpu() -> None:
    """The GPU of this process's local rank becomes the current one."""
    local, count = place().local_rank, torch.cuda.device_count()
    if local >= count:
        raise InputError(
            f"local rank {local} has no GPU: this host shows {count}; start at most one process per GPU, or correct the "
            "node's 'devices' in the cluster file, or CUDA_VISIBLE_DEVICES"
        )
    try:
        torch.cuda.set_device(local)
    except RuntimeError as error:
        if "forked" not in str(error):
            raise
        raise InputError(
            "CUDA cannot begin in this rank, since it had begun in the process that ranks are forked from, as it does where "
            "torch cannot count the GPUs by NVML, the driver's management library (does nvidia-smi run?); start ranks without "
            f"forking: torchrun --nproc-per-node={count} -m hetpipe …, with the arguments of this command"
        ) from error


def _check_group(*, use_cuda: bool) -> None:
    """InputError if the process group that is there cannot send what the devices compute."""
    found = dist.get_backend_config()
    backends = dict(pair.split(":") for pair in found.split(","))
    if use_cuda and backends.get("cuda", "gloo") == "gloo":
        raise InputError(
            f"the process group that was made before has the backends {found!r}, but the devices are GPUs, whose stages need "
            "NCCL: make it with init_process_group('cpu:gloo,cuda:nccl'), or leave it to hetpipe, which makes one where there is "
            "none"
        )
    if not use_cuda and "cpu" not in backends:
        raise InputError(
            f"the process group that was made before has the backends {found!r}, but the devices are CPUs (no GPU is found, or "
            "they are emulated), whose stages need gloo: make it with init_process_group('gloo'), or leave it to hetpipe, "
            "which makes one where there is none"
        )


def bind_devices(
    nodes: Sequence[Node],
    places: Sequence[tuple[str, int, int]],
    called: Mapping[int, str] | None = None,
    *,
    partly: bool = False,
) -> dict[str, int]:
    """Device id → rank. `places` has, per rank, (host name, agent number, local rank): an agent of torchrun is one node, the one
    by whose name it is `called`, else the one whose `host` is its host name where a node gives one, else the i-th node for agent
    i. Pure: see tests.

    torchrun's c10d rendezvous numbers agents as it likes. So where the processes of the agents without a named node are as many,
    agent for agent, as the devices of the nodes that are left (`partly`: of some of these), but in another order, an agent is the
    next node of its size.
    """
    node_of, bound = _node_of_agents(nodes, places, called or {}, partly), dict[str, int]()
    for rank, (host, agent, local) in enumerate(places):
        node = node_of[agent]
        if local >= node.device_count:
            raise InputError(
                f"local rank {local} on host {host!r} is beyond node {node.name!r}, which has {node.device_count} devices in the "
                f"cluster file; start that agent with --nproc-per-node={node.device_count}"
            )
        bound[f"{node.name}/{local}"] = rank
    return bound


def _node_of_agents(
    nodes: Sequence[Node], places: Sequence[tuple[str, int, int]], called: Mapping[int, str], partly: bool
) -> dict[int, Node]:
    hosts: dict[int, str] = {agent: host for host, agent, _ in places}
    size = Counter(agent for _, agent, _ in places)
    named, free = defaultdict[str, deque[Node]](deque), defaultdict[int, deque[Node]](deque)  # by host; by size
    node_of = _called(nodes, hosts, called)
    left = [node for node in nodes if node not in node_of.values()]
    for node in left:
        if node.host is not None:
            named[node.host].append(node)
    node_of |= {agent: named[host].popleft() for agent, host in sorted(hosts.items()) if agent not in node_of and named[host]}
    waiting, left = [agent for agent in sorted(hosts) if agent not in node_of], [node for node in left if node.host is None]
    wanted, given = Counter(size[agent] for agent in waiting), Counter(node.device_count for node in left)
    by_size = wanted <= given if partly else wanted == given
    for node in left:
        free[node.device_count if by_size else 0].append(node)
    for agent in waiting:
        fitting = free[size[agent] if by_size else 0]
        if not fitting:
            names = [node.name for node in nodes]
            raise InputError(
                f"agent {agent} on host {hosts[agent]!r} is no node of the cluster file: "
                f"{len(hosts)} agents for the nodes {names}"
            )
        node_of[agent] = fitting.popleft()
    return node_of


def _called(nodes: Sequence[Node], hosts: Mapping[int, str], called: Mapping[int, str]) -> dict[int, Node]:
    """Agent → the node that it says it is. InputError where there is none of that name, or two agents say the same."""
    by_name, found = {node.name: node for node in nodes}, dict[int, Node]()
    for agent, name in sorted(called.items()):
        where = f"{NODE} is {name!r} on host {hosts[agent]!r} (agent {agent})"
        if name not in by_name:
            raise InputError(f"{where}, but the cluster file has only the nodes {list(by_name)}")
        other = next((one for one, node in found.items() if node.name == name), None)
        if other is not None:
            raise InputError(
                f"{where}, and agent {other} on host {hosts[other]!r} says the same: each agent is a node of its own"
            )
        found[agent] = by_name[name]
    return found


def create_world(cluster: Cluster, *, partly: bool = False) -> World:
    """Bind this job's processes to the devices of `cluster`, or of some of its nodes (`partly`). The process group must exist
    (see `connect`)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    here = place()
    control = dist.new_group(list(range(size)), backend="gloo", timeout=long_timeout())
    places: list[Any] = [None] * size
    told = socket.gethostname(), here.agent, here.local_rank if launched() else rank, own_node()
    dist.all_gather_object(places, told, group=control)
    called = {agent: node for _, agent, _, node in places if node is not None}
    rank_of = bind_devices(cluster.nodes, [found[:3] for found in places], called, partly=partly)
    mine = next((d for d, r in rank_of.items() if r == rank), None)
    hosts = tuple(host for host, *_ in places)
    return World(rank=rank, size=size, device_id=mine, rank_of=rank_of, ranks=tuple(range(size)), hosts=hosts, control=control)
