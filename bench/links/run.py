"""Rates, and steps, on hosts whose rates are set: what is measured and predicted of them. See README.md beside this file.

python -m bench.links.run      # as root
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from bench.links.hosts import HEADERS, HOSTS, LIMIT_SECONDS, Host
from bench.links.steps import Row, compared
from hetpipe.spec.profile import Profile

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


def print_rates(profile: Profile) -> None:
    """As set, and as measured."""
    print("| from | to | flows | set, MB/s | measured, MB/s | error | spread |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for row in profile.provenance["links"]:
        source, target = row.get("from"), row.get("to")
        if source != target:
            wanted, got, rest = carried(HOSTS, source, target), row["bytes_per_second"], "the others"
            print(
                f"| {source or rest} | {target or rest} | {row['flows']} | {wanted / 1e6:.1f} | {got / 1e6:.1f} "
                f"| {got / wanted - 1:+.1%} | {row['relative_spread']:.0%} |"
            )
    print("\n| node | adapter out, MB/s | in, MB/s |\n|---|--:|--:|")
    for adapter in profile.adapters:
        print(f"| {adapter.node} | {adapter.rates.out / 1e6:.1f} | {adapter.rates.into / 1e6:.1f} |")
    hidden = profile.overheads[0].transfer_overlap or 0.0
    print(f"\nOf a transfer from a to b, or of what both compute beside it, {hidden:.0%} were hidden.\n")


def print_steps(rows: Sequence[Row]) -> None:
    """As measured, and as predicted with and without adapters."""
    print("| plan | measured, s | spread | predicted, s | error | each flow alone, s | error |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.name} | {row.measured:.2f} | {row.relative_spread:.0%} | {row.shared:.2f} "
            f"| {row.shared / row.measured - 1:+.1%} | {row.alone:.2f} | {row.alone / row.measured - 1:+.1%} |"
        )


def main() -> None:
    """Print the tables of README.md, and fail if a rate is not the one that was set."""
    try:
        profile, rows = compared(HOSTS)
    except subprocess.TimeoutExpired as error:
        sys.exit(f"no end within {LIMIT_SECONDS} s: {error}")
    print_rates(profile)
    print_steps(rows)
    if wrong := off(profile):
        sys.exit("\n".join(["rates that are more than 15 % off:", *wrong]))


if __name__ == "__main__":
    main()
