"""Memory limits as containers and services set them, in folders that look like both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import UsageError
from protocol.preflight import Room, disk, memory, require

MIB = 1 << 20


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """16 GiB, 12 of them available, no control groups yet."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB")
    return tmp_path


def v2(root: Path, own: str, mount_root: str = "/") -> Path:
    write(root / "proc/self/cgroup", f"0::{own}")
    write(root / "proc/self/mountinfo", f"30 23 0:26 {mount_root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw")
    return root / "sys/fs/cgroup"


def v1(root: Path, own: str, mount_root: str = "/") -> Path:
    write(root / "proc/self/cgroup", f"5:cpu,cpuacct:/elsewhere\n4:memory:{own}\n1:name=systemd:/\n0::/")
    write(
        root / "proc/self/mountinfo",
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw shared:1 - cgroup cgroup rw,memory",
    )
    return root / "sys/fs/cgroup/memory"


def limit_v2(group: Path, limit: object, used: int, reclaimable: int = 0) -> None:
    write(group / "memory.max", limit)
    write(group / "memory.current", used)
    write(group / "memory.stat", f"anon 5\nfile 9\ninactive_file {reclaimable}")


def limit_v1(group: Path, limit: int, used: int, reclaimable: int = 0) -> None:
    write(group / "memory.limit_in_bytes", limit)
    write(group / "memory.usage_in_bytes", used)
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {reclaimable}")


def test_without_control_groups_the_machine_decides(machine: Path) -> None:
    assert memory(machine) == Room(12 << 10, "this machine has")


def test_a_system_that_tells_nothing_is_not_refused(tmp_path: Path) -> None:
    assert memory(tmp_path) is None
    require("this", memory_mib=1 << 30, root=tmp_path)


def test_a_service_of_version_2_has_what_its_limit_leaves_and_cache_counts_as_free(machine: Path) -> None:
    top = v2(machine, "/system.slice/run.service")
    limit_v2(top / "system.slice/run.service", 2048 * MIB, 1024 * MIB, 512 * MIB)
    limit_v2(top / "system.slice", "max", 9000 * MIB)
    room = memory(machine)
    assert room is not None and room.mib == 1536 and "run.service" in room.bound


def test_a_limit_above_the_own_group_counts_too(machine: Path) -> None:
    top = v2(machine, "/jobs/17/step")
    limit_v2(top / "jobs/17/step", "max", 100 * MIB)
    limit_v2(top / "jobs/17", 3000 * MIB, 1000 * MIB)
    limit_v2(top / "jobs", 2500 * MIB, 1000 * MIB)
    room = memory(machine)
    assert room is not None and room.mib == 1500 and room.bound.endswith("/jobs leaves")


def test_memory_high_counts_like_a_limit(machine: Path) -> None:
    top = v2(machine, "/one")
    limit_v2(top / "one", "max", 100 * MIB)
    write(top / "one/memory.high", 700 * MIB)
    room = memory(machine)
    assert room is not None and room.mib == 600


@pytest.mark.parametrize("own", ["/", "/docker/abc", "/../../abc"])
def test_a_container_whose_namespace_hides_its_path_reads_its_mount(machine: Path, own: str) -> None:
    top = v2(machine, own)
    limit_v2(top, 1000 * MIB, 400 * MIB)
    room = memory(machine)
    assert room is not None and room.mib == 600


def test_version_1_unlimited_is_unlimited(machine: Path) -> None:
    limit_v1(v1(machine, "/"), 9223372036854771712, 100 * MIB)
    assert memory(machine) == Room(12 << 10, "this machine has")


def test_version_1_limits_are_read_where_the_mount_shows_them(machine: Path) -> None:
    top = v1(machine, "/docker/abc", mount_root="/docker/abc")
    limit_v1(top, 1024 * MIB, 512 * MIB, 128 * MIB)
    room = memory(machine)
    assert room is not None and room.mib == 640
    top = v1(machine, "/batch/7")
    limit_v1(top / "batch/7", 300 * MIB, 100 * MIB)
    room = memory(machine)
    assert room is not None and room.mib == 200


def test_the_refusal_says_what_is_needed_what_is_there_and_what_to_do(machine: Path) -> None:
    limit_v2(v2(machine, "/small") / "small", 1000 * MIB, 400 * MIB)
    require("this demo", memory_mib=600, root=machine)
    with pytest.raises(UsageError, match=r"this demo needs 601 MiB of memory, .*/small leaves 600 free; give fewer"):
        require("this demo", memory_mib=601, less="give fewer --nodes", root=machine)


def test_disk_is_asked_where_the_directory_would_be(tmp_path: Path) -> None:
    room = disk(tmp_path / "not" / "yet" / "there")
    assert room.mib > 0 and str(tmp_path) in room.bound
    with pytest.raises(UsageError, match=r"this run needs .* MiB of disk, .* on a larger disk"):
        require("this run", disk_mib=1 << 40, where=tmp_path / "not")
