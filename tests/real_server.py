"""A real Valkey or Redis server on loopback, for tests: started on a free port, stopped, killed, restarted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


def require_server():
    """Skip where no server is installed; fail where CI says that there must be one."""
    if BINARY is None:
        if os.environ.get("KVLAB_REQUIRE_SERVER"):
            pytest.fail("neither valkey-server nor redis-server is installed (apt-get install redis-server)")
        pytest.skip("neither valkey-server nor redis-server is installed (apt-get install redis-server)")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RealServer:
    """A server process with nothing in it; `options` are those of its command line."""

    def __init__(self, folder, *options, password="", tls_port=0):
        require_server()
        self.folder, self.options, self.password = folder, options, password
        self.port, self.tls_port = free_port(), tls_port
        self.process = None
        self.start()

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.port}"

    def start(self):
        """Start it, empty; its port is the same as before."""
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [BINARY, *fixed, "--dir", str(self.folder), *self.options], stdout=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{BINARY} did not open port {self.port}")

    def client(self):
        """The plain client, to look at the server past the tier."""
        import valkey

        return valkey.Valkey(port=self.port, password=self.password or None)

    def all_keys(self):
        with self.client() as client:
            return sorted(client.keys("*:*"))

    def blocks(self):
        """The keys of blocks' first values."""
        return [key for key in self.all_keys() if key.count(b":") == 2]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def freeze(self):
        """It accepts connections, for the kernel does, and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self):
        if self.process.poll() is None:
            self.thaw()
            self.process.kill()
        self.process.wait()
