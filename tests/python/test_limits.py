"""What this process may still take, read from a machine made of files."""

import dataclasses

import pytest
import torch
from noria import _C
from noria.doctor import diagnose
from noria.host.limits import (
    Found,
    Limit,
    check_fits,
    host_limits,
    margin_of,
    min_over_ranks,
    numa_node,
    pinning_limit,
    tightest,
)
from noria.model.kept_views import bytes_leaving
from torch import nn

GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    """A machine with 64 GiB available, without limits."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {80 << 20} kB\nMemAvailable:   {64 << 20} kB\nHugePages_Total: 0\n")
    write(tmp_path, "proc/self/status", f"Name: python\nVmSize:\t {3 << 20} kB\nVmData:\t {1 << 20} kB\n")
    limits = ("Max data size", "Max locked memory", "Max address space")
    write(tmp_path, "proc/self/limits", "".join(f"{name:<26}unlimited   unlimited   bytes\n" for name in limits))
    return tmp_path


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(text))


def limit_process(root, name, soft):
    text = (root / "proc/self/limits").read_text()
    write(root, "proc/self/limits", text.replace(f"{name:<26}unlimited", f"{name:<26}{soft}"))


def group_v2(root, group, limit, used, cache=0, base="sys/fs/cgroup"):
    write(root, f"{base}/{group}/memory.max", limit)
    write(root, f"{base}/{group}/memory.current", used)
    write(root, f"{base}/{group}/memory.stat", f"anon {used - cache}\ninactive_file {cache}\nactive_file 0\n")


def test_without_limits_what_is_available_is_the_limit(root):
    assert host_limits(root) == [Limit("MemAvailable", "/proc/meminfo", 64 * GIB, is_estimate=True)]
    assert pinning_limit(root) is None


def test_nothing_is_known_of_a_machine_that_says_nothing(tmp_path):
    assert host_limits(tmp_path) == [] and tightest([]) is None
    assert check_fits([("working copies", 1 << 50)], None, None) is None


def test_a_control_group_leaves_its_limit_less_what_is_used_but_for_the_file_cache(root):
    write(root, "proc/self/cgroup", "0::/job\n")
    group_v2(root, "job", 16 * GIB, 10 * GIB, cache=4 * GIB)
    assert tightest(host_limits(root)) == Limit(
        "the memory limit of the control group", "/sys/fs/cgroup/job/memory.max", 10 * GIB
    )


def test_the_groups_around_it_count_too(root):
    write(root, "proc/self/cgroup", "0::/outer/inner\n")
    group_v2(root, "outer/inner", "max", 1 * GIB)
    group_v2(root, "outer", 8 * GIB, 2 * GIB)
    assert tightest(host_limits(root)).free == 6 * GIB
    assert tightest(host_limits(root)).source == "/sys/fs/cgroup/outer/memory.max"


def test_in_a_container_the_group_is_what_is_mounted(root):
    write(root, "proc/self/cgroup", "0::/system.slice/of/the/host\n")
    group_v2(root, ".", 4 * GIB, 1 * GIB)
    assert tightest(host_limits(root)).free == 3 * GIB


@pytest.mark.parametrize("path", ["sys/fs/cgroup/memory/job", "sys/fs/cgroup/memory"])
def test_version_1_of_control_groups_is_read_too(root, path):
    write(root, "proc/self/cgroup", "3:cpuset:/\n4:memory,hugetlb:/job\n0::/\n")
    write(root, f"{path}/memory.limit_in_bytes", 12 * GIB)
    write(root, f"{path}/memory.usage_in_bytes", 8 * GIB)
    write(root, f"{path}/memory.stat", f"cache 1\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n")
    assert tightest(host_limits(root)).free == 7 * GIB
    write(root, f"{path}/memory.limit_in_bytes", 9223372036854771712)  # "none" in version 1
    assert tightest(host_limits(root)).name == "MemAvailable"


def test_the_address_space_of_the_process_is_a_limit(root):
    limit_process(root, "Max address space", 10 * GIB)
    assert tightest(host_limits(root)) == Limit("max address space of the process", "ulimit -v", 7 * GIB, is_own=True)
    limit_process(root, "Max data size", 2 * GIB)
    assert tightest(host_limits(root)) == Limit("max data size of the process", "ulimit -d", 1 * GIB, is_own=True)


def test_lockable_memory_refuses_nothing(root):
    limit_process(root, "Max locked memory", 8 << 20)
    assert pinning_limit(root) == 8 << 20
    assert tightest(host_limits(root)).name == "MemAvailable"


def free_under(*limits):
    return min_over_ranks([Found("here", 1, None, limits)])


def test_auto_leaves_a_margin_and_bytes_do_not():
    rows = [("working copies", 3 * GIB), ("optimizer state", 5 * GIB)]
    for free, budget, fits in [
        (8 * GIB, None, False),
        (8 * GIB + margin_of(8 * GIB), None, False),  # the margin is a share of what is free
        (9 * GIB, None, True),
        (8 * GIB, 8 * GIB, True),
        (8 * GIB, 100 * GIB, True),
        (8 * GIB - 1, 100 * GIB, False),
        (100 * GIB, 8 * GIB - 1, False),
    ]:
        assert (check_fits(rows, budget, free_under(Limit("the group", "memory.max", free))) is None) == fits
    assert margin_of(GIB) == 256 << 20 and margin_of(64 * GIB) == 4 * GIB


def test_bytes_go_before_the_kernels_estimate_but_not_before_a_limit():
    rows = [("working copies", 8 * GIB)]
    estimate = Limit("MemAvailable", "/proc/meminfo", GIB, is_estimate=True)
    limit = Limit("the group", "memory.max", 4 * GIB)
    assert check_fits(rows, None, free_under(estimate)) is not None
    assert check_fits(rows, 8 * GIB, free_under(estimate)) is None
    assert "the group" in str(check_fits(rows, 8 * GIB, free_under(estimate, limit)))


def test_ranks_go_by_the_least_that_one_of_them_finds():
    memory, own = Limit("MemAvailable", "/proc/meminfo", 64 * GIB), Limit("address space", "ulimit -v", 9 * GIB, True)
    small = Limit("MemAvailable", "/proc/meminfo", 24 * GIB)
    gathered = [
        Found("a", 1, (5, 80), (memory,)),
        Found("b", 2, (7, 40), (small,)),  # shares its machine with a process that shares no model
        Found("a", 1, (6, 80), (memory, own)),
    ]
    free = min_over_ranks(gathered)
    assert free.device == (5, 40)
    assert free.host == Limit("address space on rank 2", "ulimit -v", 9 * GIB, True)
    assert free.share == free.host  # no other rank shares it
    free = min_over_ranks([dataclasses.replace(each, limits=each.limits[:1], device=None) for each in gathered])
    assert free.device is None and free.host == Limit("MemAvailable on rank 1", "/proc/meminfo", 24 * GIB)
    name = "MemAvailable on rank 1, divided by the 2 processes there"
    assert free.share == Limit(name, "/proc/meminfo", 12 * GIB)
    rows = [("working copies", 16 * GIB)]
    assert check_fits(rows, 16 * GIB, free) is None
    refusal = str(check_fits(rows, None, free))
    assert name in refusal and "host_memory=<bytes>" in refusal


def test_many_processes_of_one_machine_share_what_is_free():
    found = Found("a", 1, None, (Limit("MemAvailable", "/proc/meminfo", 64 * GIB),))
    assert min_over_ranks([found]).share.free == 64 * GIB
    assert min_over_ranks([found] * 4).share.free == 16 * GIB
    assert min_over_ranks([dataclasses.replace(found, num_processes=8)]).share.free == 8 * GIB


def test_memory_that_the_model_gives_back_counts_for_what_is_taken_later():
    rows, late = [("working copies", 3 * GIB), ("first moments", 5 * GIB)], {"first moments"}

    def refusal(leaving, *limits):
        free = min_over_ranks([Found("here", 1, None, limits, each) for each in leaving])
        return check_fits(rows, 100 * GIB, free, late)

    group = Limit("the group", "memory.max", 4 * GIB)
    assert refusal([4 * GIB], group) is None
    assert refusal([4 * GIB - 1], group) is not None
    assert refusal([4 * GIB, 0], group) is not None  # the ranks go by the least
    assert refusal([100 * GIB], Limit("the group", "memory.max", 3 * GIB)) is None
    assert refusal([100 * GIB], Limit("the group", "memory.max", 3 * GIB - 1)) is not None  # these are taken before
    own = Limit("address space", "ulimit -v", 8 * GIB - 1, is_own=True)
    assert "address space" in str(refusal([100 * GIB], group, own))  # all is mapped at once
    assert check_fits(rows, 100 * GIB, free_under(group)) is not None


def test_large_weights_are_given_back_unless_others_hold_them_or_they_view_a_file(tmp_path):
    model = nn.Sequential(nn.Linear(4096, 2048, bias=False), nn.Linear(4096, 2048, bias=False), nn.Linear(64, 64))
    each = 4 * 4096 * 2048
    assert bytes_leaving([model]) == 2 * each
    model[1].weight = model[0].weight
    assert bytes_leaving([model]) == each
    model[1].weight = nn.Parameter(model[0].weight.detach()[:1000])
    assert bytes_leaving([model, model]) == each  # both are of the model
    held = model[0].weight.detach()
    assert bytes_leaving([model]) == 0
    del held
    torch.ones(2048 * 4096).numpy().tofile(tmp_path / "weights")
    model[1].weight = nn.Parameter(torch.from_file(str(tmp_path / "weights"), size=2048 * 4096).view(2048, 4096))
    assert bytes_leaving([model]) == each


def test_a_refusal_names_the_bytes_by_purpose_the_limit_and_where_it_comes_from():
    rows = [("working copies", 3 * GIB), ("held gradients", 0), ("optimizer state", 5 * GIB)]
    limits = [Limit("MemAvailable", "/proc/meminfo", 64 * GIB), Limit("the group's", "/sys/fs/cgroup/memory.max", GIB)]
    text = str(check_fits(rows, None, free_under(*limits)))
    for part in (
        f"8.0 GiB ({8 * GIB} bytes): working copies 3.0 GiB, optimizer state 5.0 GiB",
        "found 1.0 GiB free under the group's (/sys/fs/cgroup/memory.max)",
        'host_memory="auto" keeps 256.0 MiB of it free',
        "Remedy: free memory or raise that limit",
    ):
        assert part in text
    assert "does without" in str(check_fits(rows, None, free_under(Limit("MemAvailable", "/proc/meminfo", 8 * GIB))))


def test_memory_lies_next_to_the_device_where_there_are_nodes(root):
    write(root, "sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    (root / "sys/devices/system/node/node0").mkdir(parents=True)
    assert numa_node("0000:3B:00.0", root) is None  # one node
    (root / "sys/devices/system/node/node1").mkdir()
    assert numa_node("0000:3B:00.0", root) == 1
    assert numa_node("0000:3C:00.0", root) is None
    assert numa_node("", root) is None  # the device is the host
    write(root, "sys/bus/pci/devices/0000:3b:00.0/numa_node", "-1\n")  # the firmware does not say
    assert numa_node("0000:3B:00.0", root) is None


def test_this_machine_and_its_doctor_agree():
    found = diagnose()
    assert {limit.name for limit in found.memory_limits} == {limit.name for limit in host_limits()}
    assert found.home_budget is not None and 0 < found.home_budget < found.memory_available
    assert found.cores == _C.num_usable_cpus()
    names = [name for name, _ in found.rows()]
    assert names.count("memory limit") == len(found.memory_limits) and "memory for a home" in names
