"""Faults of the network: answers that do not arrive, and lines that are dead for a while."""

from __future__ import annotations

from urllib.parse import urlsplit

from faults.fault_run import Scene, fault
from faults.namespace import Namespace, lacks_namespaces
from faults.processes import LEASE
from faults.proxy import Proxy

# A client that hears nothing for so long takes its line for dead, and so does the server.
IMPATIENT = "?tcp_user_timeout=800&connect_timeout=2&keepalives_idle=1&keepalives_interval=1"
ATTENTIVE = ("tcp_user_timeout=2s", "tcp_keepalives_idle=1", "tcp_keepalives_interval=1",
             "tcp_keepalives_count=2")  # fmt: skip


@fault("commit", "answers to commits swallowed", 200, minutes=2)
def lose_commits(scene: Scene) -> None:
    """Break a connection when the server has committed, and before the client knows."""
    direct = scene.url()
    parts = urlsplit(direct)
    proxy = Proxy(parts.port or 5432)
    scene.stack.callback(proxy.stop)
    address = f"{parts.netloc.rpartition(':')[0]}:{proxy.port}"
    url = parts._replace(netloc=address).geturl()
    with scene.load(url, observed=direct) as load:
        for number in scene.rounds():
            kind = ("COMMIT", "call")[number % 2]
            before = proxy.lost[kind]
            while proxy.lost[kind] == before:
                proxy.wanted = kind
                load.pause(0.1)
            proxy.wanted = ""
            load.pause(scene.dice.uniform(0, 0.5))
    scene.counts["of a COMMIT"] += proxy.lost["COMMIT"]


@fault(
    "cut", "cuts of the line, past the leases or not", 200, minutes=10, lacks=lacks_namespaces
)
def cut(scene: Scene) -> None:
    """Cut workers and producers in a namespace off, two times in three for answers only."""
    namespace = Namespace()
    scene.stack.callback(namespace.stop)
    server = scene.server("listen_addresses='*'", *ATTENTIVE)
    url = server.url(host=namespace.address, options=IMPATIENT)
    with scene.load(url, observed=server.url(), namespace=namespace.name) as load:
        load.pause(1.0)
        for number in scene.rounds():
            (namespace.cut if number % 3 == 0 else namespace.mute)()
            load.pause(scene.dice.uniform(0.2, 2.5 * LEASE))
            namespace.restore()
            load.pause(1.0)
