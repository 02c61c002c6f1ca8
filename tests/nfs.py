"""An NFS server and a mount of it on each namespaced host, where the kernel has NFS (tests/launch/test_nfs.py boots one)."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from namespaces import Hosts

TOOLS = ("modprobe", "mount.nfs", "rpc.nfsd", "rpc.mountd", "exportfs", "rpcbind", "rpc.statd", "nsenter")
SERVER = "10.77.0.254"
LEASE_S = 10  # how long the server keeps the locks of a silent client, and after its start gives none
SERVE = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs tmpfs /var/lib/nfs
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/nfsdcltrack /var/lib/nfs/sm /var/lib/nfs/sm.bak
touch /var/lib/nfs/state /var/lib/nfs/etab /var/lib/nfs/rmtab
mount -t nfsd nfsd /proc/fs/nfsd
mount -t tmpfs -o mode=777 tmpfs {export}
rpcbind -w
rpc.statd --no-notify
exportfs -o rw,no_root_squash,insecure,fsid=0 '*:{export}'
echo {lease} > /proc/fs/nfsd/nfsv4leasetime
echo {lease} > /proc/fs/nfsd/nfsv4gracetime
rpc.nfsd 8
exec rpc.mountd --foreground
"""
MOUNT = """
hostname {host}
exec nsenter --mount=/proc/{pid}/ns/mnt mount -t nfs -o {options} {server}:{share} {point}
"""
STATD = """
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/nfs/sm /run/nfs/sm.bak
touch /run/nfs/state
rpcbind
rpc.statd --no-notify --state-directory-path /run/nfs
"""


def why_not() -> str:
    """Returns why this machine cannot serve NFS; "" where it can."""
    paths = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    if missing := [name for name in TOOLS if not shutil.which(name, path=paths)]:
        return f"{', '.join(missing)} missing"
    for module in ("nfsd", "nfs"):
        if subprocess.run(["modprobe", module], capture_output=True, check=False).returncode:
            return f"this kernel has no module {module}"
    return ""


@contextmanager
def nfs_on(hosts: Hosts, options: str) -> Iterator[None]:
    """Mounts one export as `hosts.private` on every host. options: of the mount, as "vers=4.2"."""
    hub, export = f"{hosts.prefix}hub", hosts.folder / "export"
    export.mkdir()
    hosts.ip("-n", hub, "addr", "add", f"{SERVER}/24", "dev", "br0")
    hosts.ip("-n", hub, "link", "set", "lo", "up")
    points: list[Path] = []
    serve = SERVE.format(export=export, lease=LEASE_S)
    with (hosts.folder / "nfs.log").open("w") as log:
        server = subprocess.Popen(["ip", "netns", "exec", hub, "sh", "-c", serve], stdout=log, stderr=log)
        try:
            is_old = "vers=3" in options
            for host in hosts.names:
                point = hosts.folder / host / "private"
                words = {
                    "host": host,
                    "pid": os.getpid(),
                    "options": f"{options},hard,nosharecache",
                    "server": SERVER,
                    "share": export if is_old else "/",
                    "point": point,
                }
                if is_old and "nolock" not in options:
                    subprocess.run([*inside(hosts, host), STATD], check=True)
                mount_when_served(hosts, host, MOUNT.format(**words), server)
                points.append(point)
            yield
        finally:
            for point in points:
                subprocess.run(["umount", "--force", "--lazy", point], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "exec", hub, "rpc.nfsd", "0"], capture_output=True, check=False)
            server.kill()
            server.wait()


def inside(hosts: Hosts, host: str) -> list[str]:
    """What runs the script that follows in a host's network, with a host name and mounts of its own."""
    return ["ip", "netns", "exec", hosts.prefix + host, "unshare", "--uts", "sh", "-c"]


def mount_when_served(hosts: Hosts, host: str, script: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while True:
        done = subprocess.run([*inside(hosts, host), script], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said = done.stderr + (hosts.folder / "nfs.log").read_text()
        assert server.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
