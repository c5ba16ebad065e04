"""Commands with signals, streams and folders as a shell, a scheduler or a hostile user hands them over."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.attack("streams"),
    pytest.mark.skipif(sys.platform != "linux", reason="the streams and signals of Linux"),
]
MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "qwen3-8b.json"
SECONDS = 200


def start(*arguments: object, before: str = "", after: str = "", **given: object) -> subprocess.Popen[bytes]:
    """A command of a shell, such as `trap '' CHLD; exec attnplug list 2>&-`."""
    line = " ".join(f"'{each}'" for each in (sys.executable, "-m", "attnplug", *arguments))
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **given}
    return subprocess.Popen(["sh", "-c", f"{before} exec {line} {after}"], **given)  # type: ignore[call-overload]


def done(child: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=SECONDS)
    return child.returncode, (out or b"").decode(), (err or b"").decode()


@pytest.mark.parametrize("signals", ["CHLD", "CHLD PIPE HUP TERM USR1"])
def test_inherited_signals_that_are_ignored_change_nothing(signals):
    code, out, err = done(start("list", "--json", before=f"trap '' {signals};"))
    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == "attnplug.list"


@pytest.mark.slow
def test_children_are_waited_for_where_their_end_was_ignored():
    code, out, _ = done(start("doctor", "TORCH", "--json", before="trap '' CHLD;"))
    findings = json.loads(out)["findings"]
    assert code == 0
    assert {each["state"] for each in findings} == {"ok"}


CLOSED = ("<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-")
# One command that writes has them all; a command with processes of its own has those that it could pass on.
CLOSING = [
    *((("list",), 0, closed) for closed in CLOSED),
    (("explain-code", "no-such-code"), 2, "2>&-"),
    (("explain-code", "no-such-code"), 2, "<&- >&- 2>&-"),
    *(
        pytest.param(("conformance", "TORCH", "--list"), 0, closed, marks=pytest.mark.slow)
        for closed in (">&-", "<&- >&- 2>&-")
    ),
]


@pytest.mark.parametrize(("command", "expected", "closed"), CLOSING)
def test_closed_streams_change_no_exit_code(command, expected, closed):
    code, out, err = done(start(*command, after=closed))
    assert code == expected
    assert "Traceback" not in out + err
    if expected == 0 and ">&-" not in closed.replace("2>&-", ""):
        assert out


def test_a_closed_standard_output_goes_into_no_file(tmp_path):
    """The first file that is opened would get its number."""
    code, _, err = done(start("matrix", "--device", "h100", "--json", tmp_path / "m.json", after=">&- <&-"))
    assert code == 0, err
    assert json.loads((tmp_path / "m.json").read_text())["schema"] == "attnplug.matrix"


@pytest.mark.parametrize("command", [("select", "/no/such/file"), ("list", "--nonsense")])
def test_messages_that_cannot_be_written_leave_the_exit_code(command):
    assert done(start(*command, after="2>/dev/full"))[0] == 2
    reader, writer = os.pipe()
    os.close(reader)
    child = start(*command, stderr=writer)
    os.close(writer)
    assert done(child)[0] == 2


def test_output_that_cannot_be_written_is_an_error():
    code, _, err = done(start("list", after=">/dev/full"))
    assert (code, err) == (1, "attnplug: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("stream", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_a_stream_that_does_not_block_gets_every_byte(stream):
    """As a pipe of an event loop, whose reader is slow; 64 KiB fit into it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = ("matrix", "--device", "h100", "--json", "-")
    command = command if stream == "stdout" else ("select", "n" * 100_000)
    child = start(*command, **{stream: writer})
    os.close(writer)
    # The pipe is full before the first byte is read.
    waiting = bytearray(4)
    while int.from_bytes(waiting, sys.byteorder) < 1 << 16 and child.poll() is None:
        fcntl.ioctl(reader, termios.FIONREAD, waiting)
    found = b""
    while part := os.read(reader, 1 << 15):
        found += part
    os.close(reader)
    code, _, err = done(child)
    if stream == "stdout":
        assert (code, err) == (0, "")
        assert json.loads(found)["schema"] == "attnplug.matrix"
    else:
        assert code == 2
        assert found.endswith(b"\n")
        assert found.count(b"n") > 100_000


def test_a_reader_that_leaves_early_ends_a_command_that_waits_for_it():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    child = start("matrix", "--device", "h100", "--json", "-", stdout=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    code, _, err = done(child)
    assert (code, err) == (1, "")


def test_an_interrupt_ends_a_command_whose_output_nobody_reads():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    child = start("matrix", "--device", "h100", "--json", "-", stdout=writer)
    os.close(writer)
    os.read(reader, 1)
    child.send_signal(signal.SIGINT)
    assert done(child)[0] in (130, -signal.SIGINT)
    os.close(reader)


COMMANDS = {
    "list": ("list",),
    "doctor": ("doctor", "TORCH"),
    "conformance": ("conformance", "TORCH", "--only", "declaration/light-*"),
    "matrix": (
        "matrix", "--verify", "--device", "cpu", "--backend", "TORCH", "--only", "plain/decode/d64/*", "--jobs", "1",
    ),
    "tune": ("tune", MODEL, "--device", "cpu", "--batch", "1", "--context", "16", "-o", "t.json"),
}  # fmt: skip
HOSTILE = "import os\nopen(os.path.join(os.path.dirname(__file__), 'imported'), 'a').write(__name__)\nraise RuntimeError\n"


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=pytest.mark.slow) for each in COMMANDS.values()], ids=COMMANDS
)
def test_no_process_of_a_command_imports_a_file_of_the_current_folder(command, tmp_path):
    names = "json statistics fractions dataclasses tempfile pytest xdist torch attnplug_plugin"
    for name in names.split():
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    home = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # As a script of the folder `bin`, not as `python -m`, which has imported the package before it is asked.
    script = tmp_path / "bin" / "attnplug"
    script.parent.mkdir()
    script.write_text("from attnplug.cli import main\nmain()\n")
    ran = subprocess.run(
        [sys.executable, script, *map(str, command)],
        cwd=tmp_path,
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not (tmp_path / "imported").exists()
    assert ran.returncode == 0, ran.stderr
    assert "crashed" not in ran.stdout + ran.stderr


def test_python_m_imports_no_file_of_the_current_folder_either(tmp_path):
    for name in ("torch", "statistics", "rich", "typer"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    code, out, err = done(start("list", "--json", cwd=tmp_path))
    assert (code, err) == (0, "")
    assert json.loads(out)
    assert not (tmp_path / "imported").exists()
