"""Rates, and steps, on hosts whose rates are set: what is measured and predicted of them. See README.md beside this file.

python -m bench.links.run      # as root
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from bench.links.hosts import HEADERS, HOSTS, LIMIT_SECONDS, Host
from bench.links.steps import Row, compared
from bench.tables import markdown
from hetpipe.documents.profile import Profile

WIDE = 0.15  # token buckets let bursts pass, and a busy machine leaves them idle


def carried(hosts: Sequence[Host], source: str | None, target: str | None) -> float:
    """Bytes/s from a host to a host, or to or from all others by as many flows as there can be, as the rates are set: of one
    flow the slower end's, of several no more than all ends carry together."""
    others = [host for host in hosts if host.name not in (source, target)]
    out = [host.out for host in hosts if host.name == source] or [host.out for host in others]
    into = [host.into for host in hosts if host.name == target] or [host.into for host in others]
    return min(sum(out), sum(into)) * HEADERS


def off(profile: Profile) -> list[str]:
    """What is said of rates that were measured more than 15 % beside those that were set."""
    found = []
    for row in profile.provenance["links"]:
        source, target = row.get("from"), row.get("to")
        wanted, got = carried(HOSTS, source, target), row["bytes_per_second"]
        if source != target and abs(got / wanted - 1) > WIDE:
            way = f"from {source or 'the others'} to {target or 'the others'}"
            found.append(f"{way}: set {wanted / 1e6:.1f} MB/s, measured {got / 1e6:.1f}")
    return found


def rates(profile: Profile) -> str:
    """As set, and as measured."""
    lines = []
    for row in profile.provenance["links"]:
        source, target = row.get("from"), row.get("to")
        if source != target:
            wanted, got, rest = carried(HOSTS, source, target), row["bytes_per_second"], "the others"
            numbers = [f"{wanted / 1e6:.1f}", f"{got / 1e6:.1f}", f"{got / wanted - 1:+.1%}", f"{row['relative_spread']:.0%}"]
            lines.append([source or rest, target or rest, str(row["flows"]), *numbers])
    links = markdown(["from", "to", "flows", "set, MB/s", "measured, MB/s", "error", "spread"], lines, words=2)
    each = [[a.node, f"{a.rates.out / 1e6:.1f}", f"{a.rates.into / 1e6:.1f}"] for a in profile.adapters]
    hidden = profile.overheads[0].transfer_overlap or 0.0
    adapters = markdown(["node", "adapter out, MB/s", "in, MB/s"], each)
    return f"{links}\n{adapters}\nOf a transfer from a to b, or of what both compute beside it, {hidden:.0%} were hidden.\n"


def steps(rows: Sequence[Row]) -> str:
    """As measured, and as predicted with and without adapters."""
    lines = [
        [
            row.name,
            f"{row.measured:.2f}",
            f"{row.relative_spread:.0%}",
            *(text for x in (row.shared, row.alone) for text in (f"{x:.2f}", f"{x / row.measured - 1:+.1%}")),
        ]
        for row in rows
    ]
    return markdown(["plan", "measured, s", "spread", "predicted, s", "error", "each flow alone, s", "error"], lines)


def main() -> None:
    """Print the tables of README.md, and fail if a rate is not the one that was set."""
    try:
        profile, rows = compared(HOSTS)
    except subprocess.TimeoutExpired as error:
        sys.exit(f"no end within {LIMIT_SECONDS} s: {error}")
    print(f"{rates(profile)}\n{steps(rows)}")
    if wrong := off(profile):
        sys.exit("\n".join(["rates that are more than 15 % off:", *wrong]))


if __name__ == "__main__":
    main()
