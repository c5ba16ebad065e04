"""One rank of a gloo group that runs every case of `rank_cases`: `rank_worker.py RANK SIZE FOLDER`.

It writes what failed to `FOLDER/RANK.json`, by the name of the case.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rank_cases import cases  # isort: skip


def main(rank: int, size: int, folder: Path) -> None:
    """Run the cases in order; all ranks run the same ones."""
    torch.set_num_threads(1)
    limit = dt.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit
    )
    failed, ran = {}, []
    for name, case in cases(size):
        ran.append(name)
        try:
            case(dist.group.WORLD)
        except Exception:
            failed[name] = traceback.format_exc()
            # The others wait for what this rank no longer sends, so no later case can run.
            break
    (folder / f"{rank}.json").write_text(json.dumps({"ran": ran, "failed": failed}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
