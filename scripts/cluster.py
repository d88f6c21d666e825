"""Emulated cluster with slow links on one Linux machine, for any command.

python scripts/cluster.py --hosts 8 --rate 200mbit -- mpirun -n 8 python -m jaxmpi.train experiments/digits.py
python scripts/cluster.py --hosts 4 --slots 2 --rate 1gbit -- jaxmpi train -n 8 experiments/digits.py

Hosts are called node0, node1, ... and have a network card, a host name and a /dev/shm of their own; files, cores and
memory are this machine's. Each card sends and receives at `--rate`; all are plugged into one switch, which holds every
frame for `--delay-ms`. Everything lives in namespaces without names: they end with the last process in them, and those
end with this one, killed or not. Needs Linux, iproute2, util-linux, and root or the right to make user namespaces; for
a delay /dev/net/tun, too, but not the kernel's netem.

A rank must not spin here, for each "host" believes that it owns all cores: Open MPI is told to yield. Nor may hosts be
scheduling groups of their own, which sessions are if Linux has autogroups: a rank that yields then keeps its core from
those of other hosts, beside busy programs for minutes (Linux 6.18). So all of them are put into one control group.
"""

import argparse
import collections
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FRAME_PAYLOAD = 1448 / 1514  # share of payload in a full Ethernet frame, TCP with time stamps
LATENCY = "100ms"  # longest wait of data in a card's queue: longer than any exchange bursts
TUN = "/dev/net/tun"
# Control groups by which cores are dealt out, of both kinds: folder, file of its weight, that of one task, the largest.
GROUPS = (
    (Path("/sys/fs/cgroup/cpu/jaxmpi-cluster"), "cpu.shares", 1024, 262_144),
    (Path("/sys/fs/cgroup/jaxmpi-cluster"), "cpu.weight", 100, 10_000),
)
NEEDED = ("ip", "tc", "unshare", "nsenter", "mount")


def parse(argv: list[str]) -> argparse.Namespace:
    """Options, then `--`, then the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts, 1 to 250 (default: 4)")
    parser.add_argument("--slots", type=int, default=1, help="ranks a host takes (default: 1)")
    parser.add_argument("--rate", default="200mbit", help="of each card, such as 50mbit or 1gbit (default: 200mbit)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from card to card, besides (default: 0)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not 1 <= options.hosts <= 250:
        parser.error(f"--hosts: got {options.hosts}; expected 1 to 250")
    if options.slots < 1:
        parser.error(f"--slots: got {options.slots}; expected >= 1")
    if not 0 <= options.delay_ms < 10_000:
        parser.error(f"--delay-ms: got {options.delay_ms}; expected 0 to 10000")
    if options.delay_ms and not os.path.exists(TUN):
        parser.error(f"--delay-ms: {TUN} is not there; load the kernel's module tun, or leave the delay out")
    if not options.command:
        parser.error("no command; give one after --")
    try:
        bits_per_s(options.rate)
    except ValueError as error:
        parser.error(str(error))
    return options


def bits_per_s(rate: str) -> float:
    """The number behind 200mbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--rate: got {rate!r}; expected a number and kbit, mbit or gbit, such as 200mbit")
    return float(match[1]) * BITS[match[2]]


# ---------------------------------------------------------------- outside: namespaces that end with this process


def refusal() -> str:
    """The reason why this machine cannot have namespaces; empty if it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    tried = subprocess.run([*unshare(), "ip", "link", "add", "probe", "type", "bridge"], capture_output=True, text=True)
    if tried.returncode:
        return f"not permitted here ({tried.stderr.strip()}); run as root, or allow user namespaces"
    return ""


def unshare() -> list[str]:
    """Command line that starts a command in namespaces, killed with its parent."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def run(argv: list[str]) -> int:
    """Run the command in a new cluster's first host; return its code."""
    reason = refusal()
    if reason:
        print(f"cluster.py: no emulated cluster: {reason}", file=sys.stderr)
        return 77  # exit code that test suites take for "skipped"
    folder = tempfile.mkdtemp(prefix="cluster-")  # stays empty: what is in it is seen from inside only
    line = [*unshare(), sys.executable, __file__, "--inside", folder, *argv]
    job = subprocess.Popen(line, preexec_fn=lambda: begin(parse(argv).hosts))
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(name, lambda number, _: job.send_signal(signal.SIGKILL))
    code = job.wait()
    os.rmdir(folder)
    for group, *_ in GROUPS:
        with contextlib.suppress(OSError):  # there is none, or a process is still in it: the next cluster takes it, too
            group.rmdir()
    return code if code >= 0 else 128 - code


def begin(hosts: int) -> None:
    """Enter the scheduling group, and end with the parent process.

    The kernel kills this process when its parent ends, however that happens. The group is one for all clusters, of the
    weight that the hosts of the last have one by one. Where there can be none it is left out.
    """
    for group, weight, usual, limit in GROUPS:
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            if (group / weight).exists():
                (group / "cgroup.procs").write_text("0")
                (group / weight).write_text(str(min(hosts * usual, limit)))
                if (real_time := group / "cpu.rt_runtime_us").exists():
                    real_time.write_text("100000")  # microseconds of each second, for the switch of `--delay-ms`
                break
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# ---------------------------------------------------------------- inside: switch, hosts, command


def inside(folder: Path, cluster: argparse.Namespace) -> NoReturn:
    """Set up the namespaces as pid 1, run the command, and exit."""
    sh(f"mount -t tmpfs tmpfs {folder}")
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address(i)} node{i}\n" for i in range(cluster.hosts)))
    sh(f"mount --bind {names} /etc/hosts")
    sh("ip link set lo up", "ip link add switch type bridge forward_delay 0", "ip link set switch up")
    holders = [start_host(i, cluster) for i in range(cluster.hosts)]
    cards = [card_of(pid) for pid in holders] if cluster.delay_ms else []
    for i, pid in enumerate(holders):
        start_card(i, pid, cluster)
    if cards:
        start_slow_switch(cards, cluster)
    agent = write_agent(folder, holders)
    (folder / "hostfile").write_text("".join(f"node{i} slots={cluster.slots}\n" for i in range(cluster.hosts)))
    chdir = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # a process that enters a host is in its root folder
    code = subprocess.run([*enter(holders[0]), *chdir, *cluster.command], env=environment(folder, agent)).returncode
    os._exit(code if code >= 0 else 128 - code)  # as pid 1: all other processes in here end with it


def address(host: int) -> str:
    """Address of a host's card."""
    return f"10.77.0.{host + 1}"


def start_host(i: int, cluster: argparse.Namespace) -> int:
    """Start a process that holds host i's namespaces; return its pid.

    Unless there is a delay, the host's card is plugged in.
    """
    holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "infinity"])
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
        if holder.poll() is not None:
            sys.exit(f"cluster.py: node{i}: unshare gave it no namespaces: exit code {holder.returncode}")
        time.sleep(0.005)
    if not cluster.delay_ms:
        sh(f"ip link add port{i} type veth peer name eth0 netns {holder.pid}", f"ip link set port{i} master switch up")
        sh(f"tc qdisc add dev port{i} {shape(cluster)}")
    return holder.pid


def shape(cluster: argparse.Namespace) -> str:
    """A queue that holds one direction of a card to its rate."""
    burst = max(131072, int(bits_per_s(cluster.rate) / 8 / 100))  # bytes: a timer tick's worth of packets
    return f"root tbf rate {cluster.rate} burst {burst} latency {LATENCY}"


def start_card(i: int, pid: int, cluster: argparse.Namespace) -> None:
    """Give host i a name, a /dev/shm, and its card an address."""
    inner = shlex.join(enter(pid))
    sh(
        f"{inner} hostname node{i}",
        f"{inner} mount -t tmpfs tmpfs /dev/shm",
        f"{inner} ip link set lo up",
        # Else a link that was idle for 0.2 s begins anew with 14 kB a round trip, and that is measured, not the delay.
        f"{inner} sh -c 'echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle'",
        f"{inner} ip address add {address(i)}/24 dev eth0",
        f"{inner} ip link set eth0 up",
        f"{inner} tc qdisc add dev eth0 {shape(cluster)}",
    )


# ---------------------------------------------------------------- a switch with a delay


def card_of(pid: int) -> int:
    """Plug a card into a host; return the file of its frames."""
    tunsetiff, tunsetoffload, tap, checksum_and_tso = 0x400454CA, 0x400454D0, 0x5002, 0x07
    libc, own_namespace = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(namespace, 0):
            sys.exit(f"cluster.py: setns: {os.strerror(ctypes.get_errno())}")
        card = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(card, tunsetiff, struct.pack("16sH22x", b"eth0", tap))  # frames with a header for large ones
        fcntl.ioctl(card, tunsetoffload, checksum_and_tso)
    finally:
        libc.setns(own_namespace, 0)
        os.close(own_namespace)
        os.close(namespace)
    return card


def start_slow_switch(cards: list[int], cluster: argparse.Namespace) -> None:
    """Start a process that delays frames and sends at the receiver's rate."""
    if os.fork() == 0:
        slow_switch(cards, cluster.delay_ms / 1e3, bits_per_s(cluster.rate) / 8)
    for card in cards:
        os.close(card)


def slow_switch(cards: list[int], delay_s: float, bytes_per_s: float) -> NoReturn:
    """Pass frames on, before all other work of the cores if permitted."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    header_bytes, address_bytes, largest = 10, 6, 1 << 17
    ports: dict[bytes, int] = {}  # by address
    free_s: dict[int, float] = collections.defaultdict(float)  # time when all that a card was sent has come, by card
    flying: list[tuple[float, int, int, bytes]] = []  # when it arrives, number, card, frame
    for number in itertools.count():
        wait_s = max(0.0, flying[0][0] - time.monotonic()) if flying else None
        for card in select.select(cards, [], [], wait_s)[0]:
            frame = os.read(card, largest)
            to, source = (frame[header_bytes + i * address_bytes :][:address_bytes] for i in (0, 1))
            ports[source] = card
            for other in [ports[to]] if to in ports else [c for c in cards if c != card]:
                free_s[other] = max(free_s[other], time.monotonic() + delay_s) + len(frame) / bytes_per_s
                heapq.heappush(flying, (free_s[other], number, other, frame))
        while flying and flying[0][0] <= time.monotonic():
            _, _, card, frame = heapq.heappop(flying)
            os.write(card, frame)
    raise AssertionError


def enter(pid: int) -> list[str]:
    """Command line that runs a command in a host."""
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount"]


def sh(*lines: str) -> None:
    """Run lines; stop at the first that fails, with its message."""
    for line in lines:
        process = subprocess.run(shlex.split(line), capture_output=True, text=True)
        if process.returncode:
            sys.exit(f"cluster.py: {line}: {process.stderr.strip() or f'exit code {process.returncode}'}")


def write_agent(folder: Path, holders: list[int]) -> Path:
    """Write the launcher's replacement of ssh: AGENT node3 COMMAND ..."""
    for i, pid in enumerate(holders):
        (folder / f"node{i}.pid").write_text(str(pid))
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done  # ssh options\n'
        'host="$1"; shift\n'
        f'exec nsenter --target "$(cat {folder}/$host.pid)" --net --uts --mount /bin/sh -c "$*"\n'
    )
    agent.chmod(0o755)
    return agent


def environment(folder: Path, agent: Path) -> dict[str, str]:
    """Variables that make a plain mpirun line use these hosts."""
    settings = {
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # else every host binds its rank to the same core
        "PRTE_MCA_prte_default_hostfile": str(folder / "hostfile"),
        # Process numbers begin anew in here, so sessions of two clusters would have the same names in /tmp.
        "PRTE_MCA_prte_tmpdir_base": str(folder),
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_pml": "ob1",  # TCP and shared memory, nothing that looks for better networks
        "OMPI_MCA_osc": "^ucx",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "JAXMPI_PROBE": "fresh",  # the next cluster has hosts of the same names and may have other links
    }
    return {**os.environ, **settings}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), parse(sys.argv[3:]))
    parse(sys.argv[1:])  # report errors out here, not inside
    sys.exit(run(sys.argv[1:]))
