"""A bound kernel is launched at once, and as Triton launches it where a profiler listens."""

from __future__ import annotations

import importlib
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnplug
from attnplug.core import LayerSpec, StateDims
from attnplug.ops.triton import launch
from attnplug.ops.triton.launch import BoundKernel
from attnplug.runtime import AttentionRuntime

knobs = pytest.importorskip("triton").knobs


class Tensor:
    """On a GPU that is not here."""

    is_cuda = True

    def __init__(self, place: int, device: int = 0) -> None:
        self.place, self.device = place, device

    def get_device(self) -> int:
        return self.device

    def data_ptr(self) -> int:
        return self.place


class Kernel:
    """Writes down who launched what."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    @staticmethod
    def fn(first: object, second: object, count: int, width: int) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Kernel]:
        def runner(*given: object, **options: int) -> Kernel:
            self.found.append(("triton", grid, given, options))
            return self

        return runner

    def run(self, *given: object) -> None:
        self.found.append(("direct", given))

    def warmup(self, *given: object, grid: tuple[int, ...], **options: int) -> None:
        self.found.append(("compiled", given))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Active:
        @staticmethod
        def get_current_stream(device: int) -> str:
            return f"stream of {device}"

    monkeypatch.setattr(launch, "driver", type("Driver", (), {"active": Active}))


def bound() -> tuple[Kernel, BoundKernel]:
    kernel = Kernel()
    return kernel, BoundKernel(kernel, 3, {"width": 7, "other": 1}, num_warps=4)


@pytest.mark.parametrize(
    ("hip", "options"), [(None, {"num_warps": 4, "maxnreg": 128}), ("7.0", {"num_warps": 4})]
)
def test_amd_gets_no_limit_of_registers(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, options: dict[str, int]
) -> None:
    monkeypatch.setattr(launch.torch.version, "hip", hip)
    kernel = Kernel()
    BoundKernel(kernel, 3, {"width": 7}, num_warps=4, maxnreg=128)((5,), Tensor(32), Tensor(48), 9)
    assert kernel.found[0][3] == options


@pytest.mark.usefixtures("stream")
def test_siblings_are_compiled_once_with_the_first_launch_of_a_form() -> None:
    (kernel, call), (other, sibling) = bound(), bound()
    call.siblings, sibling.siblings = (sibling,), (call, sibling)
    tensors = Tensor(32), Tensor(48)
    for count in (9, 10):
        call((5,), *tensors, count)
    assert [each[0] for each in kernel.found] == ["triton", "direct"]
    assert other.found == [("compiled", (*tensors, 9, 7))]
    sibling.compile(Tensor(36), Tensor(48), 1)
    assert [each[0] for each in other.found] == ["compiled", "compiled"]
    assert [each[0] for each in kernel.found] == ["triton", "direct", "compiled"]
    # Triton's public launcher loads what was only compiled.
    sibling((5,), *tensors, 3)
    assert other.found[-1][0] == "triton"


@pytest.mark.usefixtures("stream")
def test_what_was_compiled_is_launched_at_once() -> None:
    kernel, call = bound()
    tensors = Tensor(32, 1), Tensor(48, 1)
    call((5,), *tensors, 9)
    call((6, 2), *tensors, 10)
    assert kernel.found == [
        ("triton", (5,), (*tensors, 9, 7), {"num_warps": 4}),
        ("direct", (6, 2, 1, "stream of 1", "function", "metadata", None, None, None, *tensors, 10, 7)),
    ]


@pytest.mark.usefixtures("stream")
def test_another_device_or_alignment_is_left_to_triton() -> None:
    kernel, call = bound()
    for place, device in ((32, 0), (33, 0), (32, 1), (48, 0)):
        call((1,), Tensor(place, device), Tensor(16, device), 1)
    assert [entry[0] for entry in kernel.found] == ["triton", "triton", "triton", "direct"]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_launches(name: str) -> None:
    kernel, call = bound()
    tensors = Tensor(32), Tensor(48)
    call((5,), *tensors, 9)
    hooks = getattr(knobs.runtime, name)

    def listen(metadata: object) -> None: ...

    hooks.add(listen)
    try:
        call((5,), *tensors, 9)
    finally:
        hooks.remove(listen)
    call((5,), *tensors, 9)
    assert [entry[0] for entry in kernel.found] == ["triton", "triton", "direct"]
    assert kernel.found[1] == ("triton", (5, 1, 1), (*tensors, 9, 7), {})


def test_triton_is_launched_with_the_arguments_that_it_takes() -> None:
    """What is called past Triton's own dispatch: a version that takes other arguments shows here."""
    from triton.backends.amd.driver import HIPLauncher
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    names = ["gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata"]
    for launcher in (CudaLauncher, HIPLauncher):
        found = list(inspect.signature(launcher.__call__).parameters)
        assert found == ["self", *names, "launch_enter_hook", "launch_exit_hook", "args"]
    source = inspect.getsource(CompiledKernel.__getitem__)
    assert "self.function, self.packed_metadata, launch_metadata," in source


def compile_now(name: str) -> None:
    """Tell Triton's hook of a compiled kernel of attnplug."""
    hook = knobs.runtime.jit_post_compile_hook
    if hook is not None:
        jit = types.SimpleNamespace(__name__=name, arg_names=())
        function = types.SimpleNamespace(module="attnplug.kernels", jit_function=jit)
        hook(fn=function, compile={"constants": {}})


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_watches_that_end_in_any_order_see_what_is_compiled_inside_and_leave_the_hook_that_was_there(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    theirs: Any = lambda **facts: told.append(facts)  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", theirs)
    watches = [launch.watch_compiling() for _ in order]
    found = [each.__enter__() for each in watches]
    expected: list[list[str]] = [[], [], []]
    for ended, place in enumerate(order):
        compile_now(f"kernel{ended}")
        for each in order[ended:]:
            expected[each].append(f"kernel{ended}()")
        watches[place].__exit__(None, None, None)
    compile_now("later")
    assert found == expected
    assert knobs.runtime.jit_post_compile_hook is theirs
    assert len(told) == 4


def test_a_watch_leaves_a_hook_that_another_has_put_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    with launch.watch_compiling() as found:
        inner, told = knobs.runtime.jit_post_compile_hook, []
        knobs.runtime.jit_post_compile_hook = lambda **facts: (told.append(facts), inner(**facts))
        compile_now("a")
    compile_now("b")
    assert (found, len(told)) == (["a()"], 2)


def test_what_triton_reads_once_is_read_before_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    cache = importlib.import_module("triton.runtime.cache")
    monkeypatch.setattr(cache, "triton_key", lambda: read.append("files"))
    launch._read_triton.cache_clear()
    launch.prepare(torch.device("cpu"))
    assert not read
    for _ in range(2):
        launch.prepare(torch.device("cuda", 0))
    assert read == ["files"]
    # Other versions have it elsewhere, and it is only about time.
    launch._read_triton.cache_clear()
    monkeypatch.delattr(cache, "triton_key")
    launch.prepare(torch.device("cuda", 0))
    launch._read_triton.cache_clear()


@pytest.mark.parametrize("kind", ["builder", "state.builder"])
def test_builders_of_triton_prepare_their_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"attnplug.backends.triton.{kind}")
    found: list[torch.device] = []
    monkeypatch.setattr(module, "prepare", found.append)
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_size": 64}
    if kind == "state.builder":
        sizes |= {"num_heads": 1, "state": StateDims(rule="linear", decay="head")}
    spec = LayerSpec(dtype="float32", **sizes)
    rule, given = ("state=TRITON", {"num_states": 2}) if spec.state else ("TRITON", {"num_blocks": 4})
    AttentionRuntime(attnplug.plan({"a": spec}, "cpu", backend=rule, **given))
    assert found == [torch.device("cpu")]
