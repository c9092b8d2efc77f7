"""`hetpipe export` and `hetpipe import`: plans to other systems, and their published profiles to here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.export import TARGETS
from hetpipe.files.messages import InputError, visible
from hetpipe.files.writing import check_output, write_text

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def export_command(
    plan: Annotated[Path, typer.Argument(help="The plan: plan.json.")],
    to: Annotated[str, typer.Option("--to", help=f"The other system: {', '.join([*TARGETS][:-1])} or {[*TARGETS][-1]}.")],
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster, with hosts, nodes and types of the devices: cluster.yaml.")
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(help="The layers that are transformer blocks, as LO:HI; by default all but the first and the last."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as the arguments or the configuration of another system that come closest to it, and say what is lost."""
    from hetpipe.exchange.export import export as run
    from hetpipe.exchange.export import parse_blocks

    check_output(output)
    machines = Cluster.load(cluster) if cluster is not None else None
    found = run(Plan.load(plan), to, cluster=machines, blocks=parse_blocks(blocks))
    if output is not None:
        write_text(output, found.text)
    if as_json:
        sys.stdout.write(json.dumps({"target": found.target, "text": found.text, "lost": list(found.lost)}, indent=1) + "\n")
    elif output is None:
        sys.stdout.write(visible(found.text) if sys.stdout.isatty() else found.text)


def import_command(
    layout: Annotated[str, typer.Argument(help="The planner that published the files: sailor, fasop, metis or zorse.")],
    sources: Annotated[list[Path], typer.Argument(help="The folder of the files. For metis also its clusterfile and hostfile.")],
    model: Annotated[str, typer.Option(help="The model to read. For metis: the name to give to the model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the profile.")] = Path("profile.json"),
    cluster_output: Annotated[Path | None, typer.Option(help="Where to write the cluster.")] = None,
    nodes: Annotated[str, typer.Option(help="The nodes of the cluster, such as '4xGH-96x4,1xV100-16x8'.")] = "",
    zone: Annotated[str, typer.Option(help="sailor: the zone of the nodes.")] = "us-central1-a",
    link: Annotated[str | None, typer.Option(help="fasop, metis, zorse: bandwidth between nodes, such as '5 GB/s'.")] = None,
    inside: Annotated[
        list[str] | None, typer.Option(help="fasop, metis, zorse: bandwidth inside nodes of a type, such as 'A100=230 GB/s'.")
    ] = None,
    memory: Annotated[list[str] | None, typer.Option(help="Memory of a device type, such as 'A100=40 GiB'.")] = None,
    hidden_size: Annotated[int, typer.Option(min=0, help="fasop, metis: width of the model.")] = 0,
    sequence_length: Annotated[int, typer.Option(min=0, help="fasop, metis, zorse: tokens of a sample.")] = 0,
    attention_heads: Annotated[int, typer.Option(min=0, help="fasop, zorse: attention heads of a layer.")] = 0,
    vocabulary: Annotated[int, typer.Option(min=0, help="fasop, zorse: rows of the embedding.")] = 0,
    number_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a parameter.")] = 4,
) -> None:
    """Turn a profile that another planner published into profile.json and cluster.yaml."""
    from hetpipe.exchange.importers import ImportOptions, parse_quantities
    from hetpipe.exchange.importers import import_published as run

    check_output(output)
    check_output(cluster_output)
    links, sizes = parse_quantities(link, inside or (), memory or ())
    options = ImportOptions(
        model=model,
        nodes=nodes,
        zone=zone,
        link=links.pop("", None),
        inside=links,
        memory=sizes,
        hidden_size=hidden_size,
        sequence_length=sequence_length,
        attention_heads=attention_heads,
        vocabulary=vocabulary,
        number_bytes=number_bytes,
    )
    found = run(layout, sources, options)
    if cluster_output is not None and found.cluster is None:
        raise InputError("--cluster-output needs a cluster. Describe its nodes with --nodes, such as '4xGH-96x4'")
    found.profile.save(output)
    print(f"profile written to {output}")
    if cluster_output is not None and found.cluster is not None:
        found.cluster.save(cluster_output)
        print(f"cluster written to {cluster_output}")
