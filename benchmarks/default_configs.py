"""Reads every default configuration of the installed transformers, and says which are read or refused, and why.

Run as `python benchmarks/default_configs.py --json FILE [--only NAME ...]`, and
`python benchmarks/default_configs.py --table FILE.md BEFORE.json AFTER.json`, which needs no transformers. Each
configuration has a process of its own with a time limit. The reader builds no weights, so memory is small.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import inspect
import json
import multiprocessing
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from installed import versions

LIMIT_S, MEMORY = 300, 24 << 30
"""Of one process: seconds, and bytes of addresses."""
ATTENDS = re.compile(
    r"softmax|scaled_dot_product_attention|multi_head_attention_forward|ALL_ATTENTION_FUNCTIONS|flash_attn"
)
"""Names in a module's code that attention needs: a check that shares no line with the reader's."""
MIXERS = ("conv", "linear_attention", "mamba", "mlp", "moe", "recurrent", "rwkv", "xlstm")
READ, PARTLY, REFUSED, NO_DEFAULT = "read", "partly read", "refused", "no default"

Row = dict[str, Any]


def main() -> None:
    """Read the configurations, or write the table of two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--only", nargs="+", default=(), help="names of configurations")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--table",
        type=Path,
        nargs=3,
        metavar=("PAGE", "BEFORE", "AFTER"),
        help="write the page of two results",
    )
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="FILE", help="join these results in the file of --json"
    )
    args = parser.parse_args()
    if args.table:
        page, before, after = args.table
        page.write_text(table(json.loads(before.read_text()), json.loads(after.read_text())))
        return
    if args.join:
        write(args.json, [row for path in args.join for row in json.loads(path.read_text())["rows"]])
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    write(args.json, survey(args.only, args.jobs))


def write(target: Path | None, rows: Iterable[Row]) -> None:
    """Write all rows after each one, and print the totals; of two rows with one name the later one counts."""
    head = {"versions": versions("attnplug", "transformers", "torch"), "date": f"{dt.date.today()}"}
    named: dict[str, Row] = {}
    for row in rows:
        named[row["name"]] = row
        totals = Counter(each["outcome"] for each in named.values())
        if target:
            each = [named[name] for name in sorted(named)]
            target.write_text(json.dumps({**head, "totals": totals, "rows": each}, indent=1) + "\n")
    print(dict(Counter(each["outcome"] for each in named.values())))


def survey(only: Iterable[str], jobs: int) -> Iterator[Row]:
    """The outcome of each configuration, as soon as it ends."""
    # All processes need these modules, so they are imported once, before the fork.
    import attnplug.integrations.reader.model_reading  # noqa: F401

    context = multiprocessing.get_context("fork")
    rest = [(name, cls) for name, cls in configurations().items() if not only or name in only]
    running: dict[Connection, tuple[str, Any, float]] = {}
    while rest or running:
        while rest and len(running) < jobs:
            name, cls = rest.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(theirs, name, cls), daemon=True)
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic()
        for pipe in wait([*running], timeout=1):
            name, process, _ = running.pop(pipe)  # type: ignore[index]
            try:
                row = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                row = {"name": name, "outcome": REFUSED, "why": "the process died"}
            process.join()
            print(row["name"], row["outcome"], row.get("why", ""), flush=True)
            yield row
        for pipe, (name, process, start) in [*running.items()]:
            if time.monotonic() - start > LIMIT_S:
                process.kill()
                del running[pipe]
                yield {"name": name, "outcome": REFUSED, "why": f"took more than {LIMIT_S} s"}


def configurations() -> dict[str, type]:
    """Configuration classes by model type; those that are only inside others by their class's name."""
    import transformers

    transformers.logging.set_verbosity(50)
    found: dict[str, type] = {name: transformers.CONFIG_MAPPING[name] for name in transformers.CONFIG_MAPPING}
    classes = set(found.values())
    rest = [*found.values()]
    while rest:
        for inner in (getattr(rest.pop(), "sub_configs", None) or {}).values():
            if inner not in classes and inner not in (transformers.AutoConfig, transformers.PreTrainedConfig):
                classes.add(inner)
                rest.append(inner)
                found[inner.__name__] = inner
    return found


def child(pipe: Connection, name: str, cls: Any) -> None:
    """Send the outcome of one configuration."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(5)
    start = time.monotonic()
    row = {"name": name, **outcome(cls)}
    pipe.send({**row, "seconds": round(time.monotonic() - start, 1)})


def outcome(cls: Any) -> Row:
    """The answer of the reader to the default configuration of a class."""
    from attnplug.errors import ModelConfigError
    from attnplug.integrations.transformers import read_config

    try:
        config = cls()
    except Exception as error:  # noqa: BLE001 - a class that needs values has no default
        return {"outcome": NO_DEFAULT, "why": one_line(error)}
    try:
        model = read_config(config)
    except ModelConfigError as error:
        return {"outcome": REFUSED, "why": one_line(error)}
    except Exception as error:  # noqa: BLE001 - a fault of the reader, which the table must show
        return {"outcome": REFUSED, "why": f"RAISED {type(error).__name__}: {one_line(error)}"}
    unread = {path: kind for path, kind in model.other_layers.items() if "not read" in kind}
    others = {path: kind for path, kind in model.other_layers.items() if path not in unread}
    return {
        "outcome": PARTLY if unread else READ,
        "model": model.name,
        "layers": len(model.layers),
        "others": Counter(others.values()),
        "why": "; ".join(dict.fromkeys(map(one_line, unread.values()))),
        **silent(config, [path.partition("#")[0] for path in model.layers], list(unread), others),
    }


def silent(config: Any, layers: list[str], unread: list[str], others: Mapping[str, str]) -> Row:
    """Parts whose code could attend: those that the reader calls other than attention, and those it does not name."""
    from attnplug.integrations.reader.architecture import build_model

    model = build_model(config, "eager")
    parts = {path: type(module).__name__ for path, module in model.named_modules() if attends(type(module))}

    def stands_in(path: str, places: Iterable[str]) -> bool:
        return any(f"{path}.".startswith(f"{place}.") for place in places)

    claimed = [path for path, kind in others.items() if kind not in MIXERS]
    rest = {
        path: cls for path, cls in parts.items() if path and not stands_in(path, [*layers, *unread, *others])
    }
    around = {path for path in rest if any(place.startswith(f"{path}.") for place in layers)}
    return {
        "silent": sorted(
            {
                f"{cls} in {others[place]}"
                for path, cls in parts.items()
                for place in claimed
                if stands_in(path, [place])
            }
        ),
        "unnamed": sorted({cls for path, cls in rest.items() if path not in around}),
    }


@functools.cache
def attends(cls: Any) -> bool:
    """Whether a method of a module's class names what attention needs."""
    functions = [each for each in vars(cls).values() if inspect.isfunction(each)]
    return any(ATTENDS.search(name) for each in functions for name in inspect.unwrap(each).__code__.co_names)


def one_line(error: object) -> str:
    """Its text in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A Markdown page of both runs: totals, then a row for each configuration."""
    earlier = {row["name"]: row for row in before["rows"]}
    later = {row["name"]: row for row in after["rows"]}
    both = [(row, later[name]) for name, row in earlier.items() if name in later]
    lines = [
        "# Default configurations of transformers",
        "",
        f"Made by `default_configs.py` with transformers {after['versions']['transformers']}: configurations by model",
        f"type, and those that stand only inside others by their class. {len(both)} of {len(earlier)} have both results;",
        "the totals count these.",
        "",
        "| | before | after |",
        "|---|---|---|",
    ]
    counted: dict[str, Callable[[Row], bool]] = {
        **{
            kind: lambda row, kind=kind: row["outcome"] == kind
            for kind in (READ, PARTLY, REFUSED, NO_DEFAULT)
        },
        "call a part other than attention though its code can attend": lambda row: bool(row.get("silent")),
        "have no attention layer": lambda row: row.get("layers") == 0,
    }
    for label, counts in counted.items():
        columns = (str(sum(counts(pair[when]) for pair in both)) for when in (0, 1))
        lines.append(f"| {label} | {' | '.join(columns)} |")
    lines += [
        "",
        "| configuration | before | after | not read, because |",
        "|---|---|---|---|",
    ]
    for name, first in sorted(earlier.items()):
        last = later.get(name)
        why = (last or first).get("why", "").partition("; describe its layers")[0].replace("|", "\\|")
        lines.append(f"| {name} | {answer(first)} | {answer(last)} | {why} |")
    return "\n".join(lines) + "\n"


def answer(row: Row | None) -> str:
    """The outcome, with the number of layers."""
    if row is None:
        return "not run"
    note = " (SILENT)" if row.get("silent") else ""
    return f"{row['outcome']}, {row['layers']} layers{note}" if "layers" in row else str(row["outcome"])


if __name__ == "__main__":
    main()
