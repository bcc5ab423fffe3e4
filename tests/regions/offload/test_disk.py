"""Offloading to disk: files of its own, nothing half-read, nothing left behind, and a full disk is no disaster."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_ckpt
from hf_ckpt.errors import HostMemoryError, OffloadError, PolicyError
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload import disk
from hf_ckpt.regions.offload.cuda import CudaWire
from hf_ckpt.regions.offload.disk import DiskLink, PrivateDirectory
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.transfer import Wire
from tests import exactness, traces, zoo
from tests.late_copies import Late
from tests.offloading import engine

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs flock")

LAYERS = 6
OFFLOADED = LAYERS - 1


@pytest.fixture
def case() -> zoo.Case:
    return exactness.lora(exactness.build("llama", num_layers=LAYERS, attn_implementation="eager"), lora_dropout=0.1)


def to_disk(path: Path, **changes: Any) -> Offload:
    return Offload(to="disk", path=str(path), min_bytes=0, **changes)


def input_bytes(case: zoo.Case) -> int:
    return case.inputs["input_ids"].numel() * case.model.config.hidden_size * 4


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_bits(case: zoo.Case, mode: str, tmp_path: Path) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, mode, offload=to_disk(tmp_path)) as applied:
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
        stats = engine(applied).stats
        assert stats.bytes_out == stats.bytes_in > 0
        assert stats.num_live == 0
    assert list(tmp_path.iterdir()) == []


def test_only_a_few_buffers_are_held_in_memory(case: zoo.Case, tmp_path: Path) -> None:
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path)) as applied:
        exactness.step(case)
        exactness.step(case)
        # One is being copied while another is written; on the way back, one is used and two are read ahead.
        assert engine(applied).stats.peak_host_bytes <= 3 * input_bytes(case)
        assert engine(applied).stats.num_tensors == 2 * OFFLOADED


def test_late_copies_change_nothing(case: zoo.Case, tmp_path: Path) -> None:
    expected = exactness.step(case)
    late = Late()
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path)) as applied:
        engine(applied).use_link(DiskLink(CudaWire(_Serial(late)), HostLimits(None), str(tmp_path)))
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
    assert late.faults == []


class _Serial:
    """The late device, used by the threads of the link as well."""

    def __init__(self, late: Late) -> None:
        self._late = late
        self._lock = threading.RLock()

    def record_event(self, stream: Any) -> Any:
        event, lock = self._late.record_event(stream), self._lock
        reach = event.synchronize

        def synchronize() -> None:
            with lock:
                reach()

        event.synchronize = synchronize
        return event

    def copy(self, *tensors: Any) -> None:
        with self._lock:
            self._late.copy(*tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._late, name)


def test_everything_is_private(case: zoo.Case, tmp_path: Path) -> None:
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path)) as applied:
        loss = zoo.loss(case.model, case.inputs)
        engine(applied)._link._collect(at_most=0)
        (directory,) = tmp_path.iterdir()
        entries = {entry.name: entry.stat() for entry in directory.iterdir()}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(entry.st_mode) for entry in entries.values()} == {0o600}
        sizes = [entry.st_size for name, entry in entries.items() if name != "lock"]
        assert sizes == [input_bytes(case)] * OFFLOADED
        loss.backward()
        del loss
        assert [entry.name for entry in directory.iterdir()] == ["lock"]


def test_a_model_that_is_dropped_takes_its_files_along(tmp_path: Path) -> None:
    case = exactness.build("llama", num_layers=3)
    applied = hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path))
    exactness.step(case)
    assert len(list(tmp_path.iterdir())) == 1
    del case, applied
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_nothing_half_read_reaches_a_gradient(case: zoo.Case, damage: str, tmp_path: Path) -> None:
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path)) as applied:
        loss = zoo.loss(case.model, case.inputs)
        engine(applied)._link._collect(at_most=0)
        first = sorted(path for path in next(tmp_path.iterdir()).iterdir() if path.name != "lock")[0]
        if damage == "cut":
            os.truncate(first, 100)
        elif damage == "changed":
            first.write_bytes(b"x" + first.read_bytes()[1:])
        else:
            first.unlink()
        words = {"cut": "has 100 bytes instead of", "changed": "has changed since", "gone": "cannot be read"}
        with pytest.raises(OffloadError, match=words[damage]):
            loss.backward()
        del loss
        exactness.step(case)


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_falls_back_to_host_memory(case: zoo.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path)) as applied:
        exactness.step(case)
        monkeypatch.setattr(disk.os, "posix_fallocate", refuse)
        with pytest.warns(UserWarning, match="No space left on device.*stays in host memory"):
            assert exactness.differences(expected, exactness.step(case)) == []
        # It is said once.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert exactness.differences(expected, exactness.step(case)) == []
        assert engine(applied).stats.host_bytes >= OFFLOADED * input_bytes(case)


def test_a_full_disk_and_a_full_host_stop_the_forward(
    case: zoo.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3 * input_bytes(case)
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path, host_memory=limit)) as applied:
        exactness.step(case)
        case.model.zero_grad()
        monkeypatch.setattr(disk.os, "posix_fallocate", refuse)
        with pytest.warns(UserWarning, match="No space"), pytest.raises(HostMemoryError, match="host_memory allows"):
            exactness.step(case)
        assert all(parameter.grad is None for parameter in case.model.parameters())
        gc.collect()
        assert engine(applied).stats.num_live == 0


def test_a_disk_that_is_too_small_is_found_out_in_the_first_layer(
    case: zoo.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrivateDirectory, "free_bytes", lambda directory: 1000)
    limit = 3 * input_bytes(case)
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path, host_memory=limit)) as applied:
        with pytest.raises(HostMemoryError, match="more than the disk has free; and host memory cannot take the rest"):
            exactness.step(case)
        assert engine(applied).stats.num_tensors == 1


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda number, content, offset: write(number, content[:777], offset))
    monkeypatch.setattr(os, "preadv", lambda number, views, offset: read(number, [views[0][:501]], offset))
    content = memoryview(bytearray(os.urandom(10_000)))
    with (tmp_path / "file").open("w+b") as file:
        checksum = disk.write_all(file.fileno(), content)
        into = memoryview(bytearray(10_000))
        found = disk.read_all(file.fileno(), into)
        assert (into, found) == (content, checksum)
        assert disk.read_all(file.fileno(), memoryview(bytearray(10_001))) is None
        monkeypatch.setattr(os, "pwrite", lambda *given: 0)
        with pytest.raises(OSError, match="takes no more bytes"):
            disk.write_all(file.fileno(), content)


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = PrivateDirectory(str(tmp_path))
    monkeypatch.setattr(disk, "write_all", refuse)
    with pytest.raises(OSError, match="No space"):
        directory.write("1", memoryview(b"123"))
    assert os.listdir(directory.path) == ["lock"]
    directory.remove()


# --- Directories of other processes. ---


def killed(path: Path, act: Callable[[str], object]) -> None:
    """Run `act` in a process of its own that is killed right behind it."""
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, of which this process's are idle.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            act(str(path))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    killed(tmp_path, lambda path: PrivateDirectory(path).write("1", memoryview(b"content")))
    (left,) = tmp_path.iterdir()
    assert sorted(entry.name for entry in left.iterdir()) == ["1", "lock"]
    directory = PrivateDirectory(str(tmp_path))
    assert [str(entry) for entry in tmp_path.iterdir()] == [directory.path]
    directory.remove()


def test_a_place_that_cannot_be_locked_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_make_lock", lambda path: -1)
    with pytest.raises(PolicyError, match="could not be locked"):
        PrivateDirectory(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_taken_away_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = disk.tempfile.mkdtemp
    taken = iter([True, False])

    def mkdtemp(**given: str) -> str:
        path = make(**given)
        if next(taken):
            os.rmdir(path)
        return path

    monkeypatch.setattr(disk.tempfile, "mkdtemp", mkdtemp)
    directory = PrivateDirectory(str(tmp_path))
    assert [str(entry) for entry in tmp_path.iterdir()] == [directory.path]
    directory.remove()


def test_directories_of_living_processes_are_left_alone(tmp_path: Path) -> None:
    first, second = PrivateDirectory(str(tmp_path)), PrivateDirectory(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    first.remove()
    second.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_directories_of_ours_are_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "hf_ckpt-offload-link").symlink_to(elsewhere, target_is_directory=True)
    (scratch / "hf_ckpt-offload-file").touch()
    full = scratch / "hf_ckpt-offload-full"
    full.mkdir()
    (full / "thesis").touch()
    (scratch / "hf_ckpt-offload-empty").mkdir()
    PrivateDirectory(str(scratch)).remove()
    left = sorted(entry.name for entry in scratch.iterdir())
    assert left == ["hf_ckpt-offload-file", "hf_ckpt-offload-full", "hf_ckpt-offload-link"]
    assert (elsewhere / "lock").exists()
    assert (full / "thesis").exists()


def test_a_forked_process_does_not_remove_its_parents_files(tmp_path: Path) -> None:
    directory = PrivateDirectory(str(tmp_path))
    killed(tmp_path, lambda path: directory.remove())
    assert Path(directory.path).exists()
    directory.remove()


# --- Processes that are forked from one that offloads. ---


def exit_code_of_fork(act: Callable[[], object], timeout_s: float = 60.0) -> int:
    """Run `act` in a forked process, and return 0 if it returns in time; -9 if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            # Nothing of the tests' own runs there.
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.parametrize("to", ["disk", "cpu"])
def test_a_forked_process_takes_steps_of_its_own(case: zoo.Case, to: str, tmp_path: Path) -> None:
    offload = to_disk(tmp_path) if to == "disk" else Offload(min_bytes=0)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=offload) as applied:
        exactness.step(case)

        def act() -> None:
            assert exactness.differences(expected, exactness.step(case)) == []
            assert engine(applied).stats.num_live == 0
            # Each process has a directory of its own.
            assert len(list(tmp_path.iterdir())) == 2 * (to == "disk")

        assert exit_code_of_fork(act) == 0
        assert exactness.differences(expected, exactness.step(case)) == []


def test_what_was_sent_before_a_fork_stays_with_the_process_that_sent_it(case: zoo.Case, tmp_path: Path) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path)) as applied:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)

        def go_on() -> None:
            with pytest.raises(OffloadError, match=r"^This process was forked from another one between .* fork before"):
                loss.backward()

        def drop() -> None:
            nonlocal loss
            del loss
            gc.collect()
            assert engine(applied).stats.num_live == 0

        assert exit_code_of_fork(go_on) == 0
        assert exit_code_of_fork(drop) == 0
        loss.backward()
        assert exactness.differences(expected, (loss.detach(), exactness.gradients(case.model))) == []
    assert list(tmp_path.iterdir()) == []


def test_what_waits_in_ordinary_memory_is_also_the_forked_processs(case: zoo.Case) -> None:
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0)) as applied:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
        sent = engine(applied).stats.num_live

        def act() -> None:
            loss.backward()
            assert exactness.differences(expected, (loss.detach(), exactness.gradients(case.model))) == []

        assert exit_code_of_fork(act) == 0
        assert engine(applied).stats.num_live == sent > 0
        act()


@pytest.mark.parametrize("to", ["disk", "cpu"])
def test_a_lock_that_another_thread_held_does_not_stop_a_forked_process(
    case: zoo.Case, to: str, tmp_path: Path
) -> None:
    offload = to_disk(tmp_path) if to == "disk" else Offload(min_bytes=0)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=offload) as applied:
        exactness.step(case)
        is_held, is_done = threading.Event(), threading.Event()

        def hold() -> None:
            with engine(applied)._lock:
                is_held.set()
                is_done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        is_held.wait()
        try:
            code = exit_code_of_fork(lambda: _assert_exact(expected, case))
        finally:
            is_done.set()
            thread.join()
        assert code == 0


def _assert_exact(expected: exactness.Result, case: zoo.Case) -> None:
    assert exactness.differences(expected, exactness.step(case)) == []


def test_files_are_not_followed_through_links(tmp_path: Path) -> None:
    directory = PrivateDirectory(str(tmp_path))
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    os.symlink(target, os.path.join(directory.path, "1"))
    with pytest.raises(OSError, match="File exists"):
        directory.write("1", memoryview(b"other"))
    os.symlink(target, os.path.join(directory.path, "2"))
    with pytest.raises(OffloadError, match="cannot be read"):
        directory.read("2", memoryview(bytearray(4)), 0)
    assert target.read_bytes() == b"mine"
    directory.remove()


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r'path=".*missing", which is no directory. Make it, or name another'):
        disk.check_path(str(tmp_path / "missing"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PolicyError, match="is no directory"):
        disk.check_path(str(file))
    disk.check_path(str(tmp_path))
    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)
    with pytest.raises(PolicyError, match=r"no file can be written and locked: .*No space left"):
        disk.check_path(str(tmp_path))


def test_a_missing_path_is_refused_before_the_model_is_touched(case: zoo.Case, tmp_path: Path) -> None:
    found = traces.snapshot(case.model)
    with pytest.raises(PolicyError, match="is no directory"):
        hf_ckpt.apply(case.model, "full", offload=to_disk(tmp_path / "missing"))
    assert traces.differences(found, traces.snapshot(case.model)) == []


def test_a_path_of_another_machine_is_no_matter_where_nothing_is_written(tmp_path: Path) -> None:
    model = exactness.build("llama", num_layers=3).model.to("meta")
    with hf_ckpt.apply(model, "full", offload=to_disk(tmp_path / "missing")) as applied:
        assert "offload to disk" in applied.summary()


def test_closing_waits_for_what_is_out(tmp_path: Path) -> None:
    link = DiskLink(Wire(), HostLimits(None), str(tmp_path))
    tensor = torch.randn(100)
    handle = link.send(tensor)
    link.close()
    assert torch.equal(link.receive(handle), tensor)
    assert len(list(tmp_path.iterdir())) == 1
    link.release(handle)
    assert list(tmp_path.iterdir()) == []
    assert link.host_bytes == 0
