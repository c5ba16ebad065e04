"""The ranks of a gloo group that run cases of `rank_cases`: `rank_worker.py SIZE FOLDER [NAME ...]`.

Without names they run all. Each writes what failed to `FOLDER/RANK.json`, by the name of the case. In the last case the
last rank of two hangs, and that of three dies. The exit codes of all are printed.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rank_cases import Case, cases, lose_a_rank  # isort: skip


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    """Run the cases in order; all ranks run the same ones."""
    chosen = [each for each in cases(size) if not names or each[0] in names]
    torch.set_num_threads(1)
    limit = dt.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit
    )
    failed, ran = {}, []
    for name, case in (*chosen, ("a lost rank", _lose_a_rank(folder))):
        ran.append(name)
        try:
            case(dist.group.WORLD)
        except Exception:
            failed[name] = traceback.format_exc()
            # The others wait for what this rank no longer sends, so no later case can run.
            break
    (folder / f"{rank}.json").write_text(json.dumps({"ran": ran, "failed": failed}))
    sys.stderr.flush()
    # The groups of a rank that was lost would keep the process.
    os._exit(0)


def _lose_a_rank(folder: Path) -> Case:
    def leave() -> None:
        if dist.get_world_size() == 3:
            os._exit(3)
        dist.FileStore(f"{folder}/named", 2).wait(["named"])
        os._exit(3)

    def lose(group: dist.ProcessGroup) -> None:
        lose_a_rank(group, leave)
        if dist.get_world_size() == 2:
            dist.FileStore(f"{folder}/named", 2).set("named", "yes")

    return lose


def start(rank: int, size: int, folder: Path, names: list[str]) -> int:
    """The process of a rank, which has the modules that are imported here."""
    process = os.fork()
    if process:
        return process
    try:
        main(rank, size, folder, names)
    finally:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    ranks = [start(rank, size, folder, sys.argv[3:]) for rank in range(size)]
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]))
