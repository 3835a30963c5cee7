"""`netlayer nic`: the fabric's end points. Sub-commands are loaded when they are called."""

from __future__ import annotations

import click

from netlayer.commands.lazy_group import Lazy, LazyGroup

_LOOK, _CHANGE = "congestion.nic.commands.look", "congestion.nic.commands.change"
_COMMANDS = {
    "apply": Lazy(
        f"{_CHANGE}:apply", "Make a profile so on this host's NICs, journalled; prints the plan without --apply."
    ),
    "env": Lazy("congestion.nic.commands.env:env", "NCCL's environment for a job."),
    "fabric": Lazy(
        "congestion.nic.commands.fabric:fabric", "A profile on all hosts and switches of a cluster file: scripts."
    ),
    "inventory": Lazy(f"{_LOOK}:inventory", "RDMA devices of a host, where they sit, how they can be set."),
    "pcap": Lazy(
        "congestion.nic.commands.pcap:pcap", "RoCE packets of a capture: streams, marks, losses, round trips."
    ),
    "plan": Lazy(f"{_LOOK}:plan", "What a profile would change on each device; changes nothing."),
    "rollback": Lazy(f"{_CHANGE}:rollback", "Undo the last change, or one that did not end."),
    "switch": Lazy("congestion.nic.commands.switch:switch", "The same profile for switches: SONiC, NVUE, EOS, NX-OS."),
    "timers": Lazy("congestion.nic.commands.timers:timers", "Retransmit timers that outlive a link flap."),
    "verbs": Lazy("congestion.nic.commands.verbs:verbs", "Measure RDMA NICs: bandwidth, latency, every byte checked."),
    "verify": Lazy(f"{_LOOK}:verify", "Compare what is set now with a profile."),
    "watch": Lazy("congestion.nic.commands.watch:watch", "Sample counters and say what is wrong."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def nic() -> None:
    """Configure and watch RDMA NICs.

    \b
    Examples:
      netlayer nic inventory
      netlayer nic plan --profile examples/profiles/lossless-dcqcn.toml
      netlayer nic apply --profile examples/profiles/lossless-dcqcn.toml --apply
      netlayer nic verify --profile examples/profiles/lossless-dcqcn.toml
      netlayer nic rollback --apply
    """
