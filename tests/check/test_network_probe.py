import os
import socket
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest
from probing import NAMESPACES, ask, made_host

from paceline.check.probes.link_probe import LARGE_BYTES, measure_speed
from paceline.check.probes.network_probe import (
    default_interface,
    interface_kind,
    probe_ib_devices,
    probe_interfaces,
    probe_network,
    probe_port,
)

HOST = f"pf{os.getpid()}"  # of this test process alone


def listen(port: int = 0) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))
    listener.listen()
    return listener


def write_interface(root: Path, files: dict[str, str], folders: tuple[str, ...] = ()) -> Path:
    """An interface's folder as /sys/class/net shows it."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
    for name, text in files.items():
        (root / name).write_text(text + "\n")
    return root


def test_every_interface_is_listed_with_the_addresses_psutil_knows():
    found = {each["name"]: each for each in probe_interfaces()}
    assert found.keys() == psutil.net_if_addrs().keys() | {name for _, name in socket.if_nameindex()}
    assert (found["lo"]["kind"], found["lo"]["loopback"], found["lo"]["up"]) == ("loopback", True, True)
    assert "127.0.0.1" in found["lo"]["addresses"]
    assert {name: each["mtu"] for name, each in found.items()} == {
        name: each.mtu for name, each in psutil.net_if_stats().items()
    }


def test_the_default_interface_is_the_one_that_ip_names():
    done = subprocess.run(["ip", "route", "show", "default"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if done.returncode or "dev" not in words:
        pytest.skip("needs ip and a default route")
    assert default_interface() == words[words.index("dev") + 1]


@pytest.mark.parametrize(
    ("files", "folders", "driver", "kind"),
    [
        ({"type": "1"}, ("device",), "r8169", "ethernet"),
        ({"type": "1"}, ("device", "wireless"), "iwlwifi", "wifi"),
        ({"type": "1", "uevent": "DEVTYPE=wlan\nINTERFACE=wlp3s0"}, ("device",), "iwlwifi", "wifi"),
        ({"type": "1", "uevent": "DEVTYPE=bridge\nINTERFACE=docker0"}, ("bridge",), "bridge", "bridge"),
        ({"type": "1"}, (), "veth", "veth"),
        ({"type": "1", "uevent": "DEVTYPE=bond"}, ("bonding",), "bonding", "bond"),
        ({"type": "65534", "uevent": "DEVTYPE=wireguard"}, (), "wireguard", "tunnel"),
        ({"type": "65534", "tun_flags": "0x1001"}, (), "tun", "tunnel"),
        ({"type": "1", "uevent": "DEVTYPE=vxlan"}, (), "vxlan", "tunnel"),
        ({"type": "1", "uevent": "DEVTYPE=vlan"}, ("lower_eth0",), "802.1Q VLAN Support", "ethernet"),
        ({"type": "32"}, ("device",), "ib_ipoib", "infiniband"),
        ({"type": "1"}, (), "dummy", "other"),
    ],
)
def test_the_kind_of_an_interface_does_not_depend_on_its_name(tmp_path, files, folders, driver, kind):
    assert interface_kind(write_interface(tmp_path, files, folders), driver=driver) == kind


def test_infiniband_devices_have_a_state_a_rate_and_an_interface(tmp_path):
    (tmp_path / "mlx5_0/device/net/ib0").mkdir(parents=True)
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)", "link_layer": "InfiniBand"}.items():
        (tmp_path / "mlx5_0/ports/1" / name).write_text(text + "\n")
    port = {"port": 1, "state": "ACTIVE", "rate_gbps": 100.0, "link_layer": "InfiniBand", "interface": "ib0"}
    assert probe_ib_devices(tmp_path) == [{"name": "mlx5_0", **port}]


def test_a_taken_port_names_its_holder_and_the_next_free_one():
    with closing(listen()) as listener:
        port = listener.getsockname()[1]
        found = probe_port(port)
        assert (found["port"], found["free"], found["error"]) == (port, False, "Address already in use")
        assert found["holder"]["pid"] == os.getpid()
        assert probe_network({"port": port})["network"]["free_port"] in range(port + 1, port + 11)


def test_a_port_that_just_closed_is_free():
    with closing(listen()) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # the closing side stays in TIME_WAIT
    assert probe_port(port) == {"port": port, "free": True, "error": None, "holder": None}


def test_a_number_that_is_not_a_port_is_an_error_and_without_a_port_none_is_probed():
    assert probe_port(70_000)["free"] is False
    network = probe_network({"port": None})["network"]
    assert (network["ports"], network["free_port"]) == ([], None)


@pytest.mark.dist
@NAMESPACES
def test_a_name_at_127_0_1_1_resolves_to_that():
    name = HOST + "a"
    hosts = f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
    with made_host(name, files={"hosts": hosts, "nsswitch.conf": "hosts: files\n"}) as before:
        network = ask("network_probe", before=before)["network"]
    assert (network["hostname"], network["addresses"], network["resolve_error"]) == (name, ["127.0.1.1"], None)


@pytest.mark.dist
@NAMESPACES
def test_an_unknown_name_is_an_error_at_once():
    with made_host(HOST + "b", files={"hosts": "127.0.0.1 localhost\n", "nsswitch.conf": "hosts: files\n"}) as before:
        network = ask("network_probe", before=before)["network"]
    assert (network["addresses"], network["resolve_error"]) == ([], "Name or service not known")
    kinds = {each["name"]: (each["kind"], each["addresses"][:1]) for each in network["interfaces"]}
    assert (kinds["lo"], kinds["eth0"]) == (("loopback", ["127.0.0.1"]), ("veth", ["10.77.9.1"]))
    assert network["default_interface"] is None


@pytest.mark.dist
@NAMESPACES
def test_a_dead_name_server_is_asked_for_two_seconds():
    files = {"hosts": "127.0.0.1 localhost\n", "nsswitch.conf": "hosts: dns\n", "resolv.conf": "nameserver 10.77.9.2\n"}
    with made_host(HOST + "c", files=files) as before:
        network = ask("network_probe", before=before)["network"]
    assert (network["addresses"], network["resolve_error"]) == (None, "no answer in 2 s")


def test_a_slow_link_is_measured_by_its_first_bytes_and_a_fast_one_by_as_many_as_take_a_fifth_of_a_second():
    sizes = list[int]()

    def seconds_of(size: int, *, bytes_per_s: float) -> float:
        sizes.append(size)
        return size / bytes_per_s

    assert measure_speed(partial(seconds_of, bytes_per_s=1.25e6)) == 10_000_000
    assert sizes == [LARGE_BYTES]
    assert measure_speed(partial(seconds_of, bytes_per_s=1.25e9)) == pytest.approx(1e10)
    assert sizes == [LARGE_BYTES, LARGE_BYTES, 250_000_000]
