"""`olm-data mix`: options and what is printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from olm_data.commands.said import note, quiet, refuse_given, warn
from olm_data.errors import UsageError, printable, typed
from olm_data.printing import emit, lines

if TYPE_CHECKING:
    from olm_data.mixture.mix import MixResult

LOOK_SECONDS = 0.5


@click.command()
@click.argument("manifest", required=False, metavar="MANIFEST")
@click.option("--output", help="Lock file to write.  [default: NAME.lock.json beside it]")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace another lock at the output.")
@click.option("--explain", is_flag=True, help="Print how each integer of the lock came out.")
@click.option("--tree", is_flag=True, help="Print stages, groups and sources as a tree.")
@click.option(
    "--diff",
    nargs=2,
    metavar="OLD NEW",
    help="Say what differs between two locks (or manifests), and from which row on.",
)
@click.option(
    "--extend",
    metavar="TOKENS",
    help="Let the last stage of the lock go on.  [default output: NAME-longer.lock.json]",
)
@click.option(
    "--revise",
    metavar="LOCK",
    help="Go on with the manifest where a run of the lock is.  [needs --at]",
)
@click.option(
    "--at",
    metavar="RUN|TOKENS",
    help="With --revise: a run (its last checkpoint), a checkpoint, or tokens from the beginning.",
)
@click.option(
    "--like",
    metavar="LOCK",
    help="Draw the documents of the lock, in its order, as the datasets of the manifest have them.",
)
@click.option(
    "--compare-packing", is_flag=True, help="Compare ways to pack its documents into rows."
)
@click.option(
    "--sequence-length", help="With --compare-packing: 2048,8192.  [default: the manifest's]"
)
@click.option(
    "--documents",
    default="16M",
    show_default=True,
    help='With --compare-packing: look at the first N of each dataset; or "all".',
)
@click.option("--html", help="With --compare-packing: write a page with pictures, too.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def mix(
    manifest: str | None,
    output: str | None,
    explain: bool,
    tree: bool,
    diff: tuple[str, str] | None,
    extend: str | None,
    revise: str | None,
    at: str | None,
    like: str | None,
    compare_packing: bool,
    as_json: bool,
    sequence_length: str | None,
    documents: str,
    html: str | None,
    **how: bool,
) -> None:
    """Compile a mixture manifest into the lock that training takes.

    \b
    olm-data mix manifest.yaml                  writes manifest.lock.json
    olm-data mix manifest.yaml --dry-run        prints the plan only
    olm-data mix manifest.yaml --dry-run --explain --tree
    olm-data mix manifest.yaml --extend 10B     writes manifest-longer.lock.json
    olm-data mix --revise old.lock.json --at runs/1 new.yaml    writes new.lock.json
    olm-data mix --like old.lock.json other-tokens.yaml         writes other-tokens.lock.json
    olm-data mix --diff old.lock.json manifest.yaml
    olm-data mix manifest.yaml --compare-packing --html packing.html
    olm-data mix ./tokens/books --compare-packing --sequence-length 2048,8192
    """
    if diff:
        others = (manifest, output, explain, tree, extend, revise, at, like, compare_packing)
        if any(others):
            raise UsageError(
                "--diff takes two locks or manifests and nothing else",
                where="--diff",
                fix="olm-data mix --diff old.lock.json new.lock.json",
            )
        from olm_data.mixture.diff import diff as compare
        from olm_data.mixture.mix import read_or_compile

        emit(compare(*map(read_or_compile, diff)), as_json)
        return
    if manifest is None:
        raise UsageError("no manifest is given", fix="olm-data mix manifest.yaml")
    if compare_packing:
        _compare_packing(manifest, sequence_length, documents, html, as_json)
        return
    refuse_given(("sequence_length", "documents", "html"), "--compare-packing")
    from olm_data.counts import parse_count
    from olm_data.mixture import mix as verb
    from olm_data.mixture.like import mix_like
    from olm_data.mixture.revise import extend as extend_lock
    from olm_data.mixture.revise import revise as revise_lock
    from olm_data.mixture.revise import standing
    from olm_data.mixture.summary import warnings
    from olm_data.path_kinds import require

    if bool(revise) != bool(at) or (revise and extend):
        raise UsageError(
            "--revise takes a lock, --at says where in its run, and --extend has no part in it",
            where="--revise",
            fix="olm-data mix --revise old.lock.json --at RUN new.yaml",
        )
    if like and (revise or extend):
        raise UsageError(
            "--like makes a lock of its own", where="--like", fix="leave --revise or --extend out"
        )
    require(manifest, "mixture", *(["lock"] if extend else []), "file")
    if revise and at:
        done = revise_lock(revise, at, manifest, output, **how)
    elif like:
        done = mix_like(like, manifest, output, **how)
    elif extend:
        tokens = parse_count(extend, "--extend")
        done = extend_lock(manifest, tokens, output, **how)
    else:
        done = _when_there(lambda: verb.mix(manifest, output, **how))
    _print_mixed(done, explain=explain, tree=tree, as_json=as_json)
    for warning in [*warnings(done.lock), *done.warnings]:
        warn(warning)
    if not done.lock.complete:
        there = done.lock.rows_there()
        note(
            f"text is still to arrive: {there:,} of {done.lock.total_rows:,} rows are there; what "
            "is said of tokens and epochs counts what there is. A run goes on as the text arrives"
        )
    made = f"{done.status}: {done.path} (digest {done.lock.digest[:12]})"
    if quiet() and not (as_json or tree or explain):
        click.echo(printable(made))
    note(made)
    if extend or revise:
        older, length = done.lock.extends[-1], done.lock.sequence_length
        note(
            f"rows 0 to {older.rows - 1:,} are those of lock {older.digest[:12]} (order digest "
            f"{older.order_sha256[:12]} in both), {older.rows * length:,} tokens; "
            f"{done.lock.total_rows - older.rows:,} follow"
        )
    for line in standing(done.lock) if revise else ():
        note(line)
    options = f" --extend {extend}" if extend else f" --like {typed(like)}" if like else ""
    if revise and at:
        options = f" --revise {typed(revise)} --at {typed(at)}"
    following = (
        f"olm-data mix {typed(manifest)}{options}"
        if how["dry_run"]
        else f"torchrun -m olm_train.run train.yaml --data_loader.mixture={typed(done.path)}"
    )
    note(f"next: {following}")


def _when_there(made: Callable[[], MixResult]) -> MixResult:
    """Return a lock, as soon as there is a shard of each source (`order: arriving`)."""
    from olm_data.mixture.arriving import NotArrived
    from olm_data.tokenization.waiting import Waiting

    waiting: Waiting | None = None
    while True:
        try:
            return made()
        except NotArrived as error:
            waiting = waiting or Waiting(error.places)
            if line := waiting.line():
                note(line)
            time.sleep(LOOK_SECONDS)


def _print_mixed(done: MixResult, *, explain: bool, tree: bool, as_json: bool) -> None:
    import msgspec

    from olm_data.mixture import summary as shown
    from olm_data.mixture.summary import summarise

    numbers = summarise(done.lock)
    trees = shown.tree(done.lock) if tree else []
    arithmetic = shown.explain(done.lock) if explain else []
    result = {"lock": done.path, "status": done.status, **msgspec.to_builtins(numbers)}
    result["warnings"] += done.warnings
    result |= {"explain": arithmetic} if explain else {}
    result |= {"tree": trees} if tree else {}
    short = tree or explain or quiet()
    emit(result, as_json, [*shown.tree_lines(trees), *arithmetic] if short else lines(numbers))


def _compare_packing(
    target: str, sequence_length: str | None, documents: str, html: str | None, as_json: bool
) -> None:
    from olm_data.counts import parse_count
    from olm_data.mixture.mix import compare_packing
    from olm_data.packing.compare import comparison_lines, write_comparison
    from olm_data.path_kinds import require
    from olm_data.storage.output_paths import refuse_output

    refuse_given(
        ("output", "dry_run", "overwrite", "explain", "tree", "extend", "revise", "at", "like"),
        "a lock; this writes none",
    )
    require(target, "mixture", "dataset", "file")
    lengths = sequence_length.split(",") if sequence_length else []
    if not all(text.isdecimal() and int(text) for text in lengths):
        raise UsageError(
            f"{sequence_length!r} are not sequence lengths",
            where="--sequence-length",
            fix="--sequence-length 2048,8192",
        )
    if html is not None:
        refuse_output(html, "--html", "local file")
    most = None if documents == "all" else parse_count(documents, "--documents")
    found = compare_packing(target, [int(text) for text in lengths], most_documents=most)
    emit(found, as_json, comparison_lines(found))
    if html is not None:
        note(f"wrote {write_comparison(found, html)}")
    best = min(found, key=lambda one: (one.cut_avoidable, one.padding))
    note(f"next: write packing: {best.packing} in the mixture's manifest.yaml")
