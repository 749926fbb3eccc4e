"""`olm-data export`: options and what is printed."""

from __future__ import annotations

import shlex

import click

from olm_data.commands.said import note, show_progress
from olm_data.errors import printable
from olm_data.printing import emit

READERS = {
    "olmo-core": 'NumpyFSLDatasetConfig.glob("{output}/*.npy", dtype=NumpyDatasetDType.{dtype})',
    "megatron": "--data-path {output}/{prefix}",
    "datatrove": 'DatatroveFolderDataset("{output}", filename_pattern="*.ds", token_size={size}, '
    "seq_len=...)",
    "mds": 'StreamingDataset(local="{output}", batch_size=...)',
    "litdata": 'litdata.StreamingDataset("{output}")',
    "hf": 'datasets.load_from_disk("{output}")',
}


@click.command()
@click.argument("target", metavar="DATASET")
@click.option("--to", "form", required=True, metavar="|".join(READERS), help="Format to write.")
@click.option("--output", required=True, metavar="DIR", help="Folder or s3:// prefix to make.")
@click.option("--merge", is_flag=True, help="megatron: one prefix for all shards, not one each.")
@click.option("--dry-run", is_flag=True, help="Print what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def export(target: str, form: str, output: str, merge: bool, dry_run: bool, as_json: bool) -> None:
    """Write a dataset as files that another project's own reader takes.

    \b
    olm-data export ./tokens/books --to olmo-core --output ./exported
    olm-data export ./tokens/web --to megatron --merge --output ./web-megatron
    olm-data export s3://bucket/tokens/web --to mds --output s3://bucket/web-mds
    """
    from olm_data.counts import scaled
    from olm_data.dataset.dataset import Dataset
    from olm_data.dataset.target import dataset_root
    from olm_data.extensions.exporting import export as verb
    from olm_data.extensions.exporting.token_files import MERGED

    with show_progress("export") as progress:
        done = verb.export(
            target,
            form,
            output,
            merge=merge,
            dry_run=dry_run,
            watch=lambda tokens, total: progress.update(
                tokens / max(total, 1),
                [f"{scaled(tokens / max(progress.seconds, 1e-9))} tokens/s", f"{tokens:,} tokens"],
            ),
        )
    emit(done, as_json)
    if dry_run:
        words = ["olm-data", "export", target, "--to", form, "--output", output]
        note(f"next: {printable(shlex.join(words + ['--merge'] * merge))}")
        return
    dataset = Dataset.open(dataset_root(target))
    shards = dataset.manifest.shards
    read = READERS[form].format(
        output=printable(done.output),
        dtype=dataset.dtype.name,
        size=dataset.dtype.itemsize,
        prefix=MERGED if merge else _prefixes([shard.name for shard in shards]),
    )
    note(f"next: {read}")


def _prefixes(names: list[str]) -> str:
    return "" if not names else names[0] + " ..." * (len(names) > 1)
