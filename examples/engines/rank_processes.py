"""The ranks of an engine on several GPUs: each is a process that runs the same script on the same settings.

So each registers its weights and backends itself, and all of them schedule the same steps. The first prints the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OWN = "VLLM_DEMO_RANK"
"""Is set here alone: launchers of jobs, such as torchrun, set RANK for processes that know nothing of it."""


def rank() -> int:
    """The number of this process among the ranks, from 0; also 0 where it is alone."""
    return int(os.environ.get(_OWN, "0"))


def environment(ranks: int) -> dict[str, str]:
    """What all ranks have in their environment: one host, and exchanges without NVLink's multicast."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    network = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # Multicast needs a service that hosts with a part of their GPUs lent out may not have.
    exchange = {"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    return {**network, **exchange, **os.environ, **place}


@contextlib.contextmanager
def started(settings: Mapping[str, Any]) -> Iterator[None]:
    """Make this process the first of `settings["ranks"]`, and run this script in the others as long as the block runs.

    Where one of them fails, this process ends too: it would wait for what that rank no longer sends.
    """
    ranks = settings.get("ranks", 1)
    if ranks == 1 or _OWN in os.environ:
        yield
        return
    os.environ.update(environment(ranks) | _place(0))
    ended = threading.Event()
    others = [_start(number, settings) for number in range(1, ranks)]
    for other in others:
        threading.Thread(target=_watch, args=(other, others, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for other in others:
            other.kill()


def _place(number: int) -> dict[str, str]:
    return dict.fromkeys((_OWN, "RANK", "LOCAL_RANK"), str(number))


def _start(number: int, settings: Mapping[str, Any]) -> subprocess.Popen[str]:
    own = {**os.environ, **_place(number)}
    other = subprocess.Popen(  # noqa: S603  (our own interpreter on our own script)
        [sys.executable, *sys.argv], stdin=subprocess.PIPE, env=own, text=True
    )
    with other.stdin as given:  # type: ignore[union-attr]
        given.write(json.dumps(settings))
    return other


def _watch(
    other: subprocess.Popen[str], others: Sequence[subprocess.Popen[str]], ended: threading.Event
) -> None:
    if other.wait() and not ended.is_set():
        for each in others:
            each.kill()
        sys.stdout.flush()
        os._exit(1)
