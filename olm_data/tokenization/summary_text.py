"""What `olm-data tokenize` and `add` say: the plan before (`--dry-run`) and the result after."""

from __future__ import annotations

from fractions import Fraction

from olm_data.counts import counted, duration, rates
from olm_data.dataset.account import DROP_REASONS, NO_TOKENS, SKIP_REASONS
from olm_data.dataset.manifest import Manifest
from olm_data.dataset.plan import Plan
from olm_data.errors import printable, typed
from olm_data.sources.base import DocumentBatch, SourcePlan
from olm_data.sources.passed import passed_lines, tally
from olm_data.tokenization.quarantine import FOLDER
from olm_data.tokenization.request import Request
from olm_data.tokenization.summary import Summary, bad_records
from olm_data.tokenizer.tokenizer import TokenizerSpec

SAMPLE_TEXT = 70
INPUTS_SHOWN = 10

_SPECIAL = {
    "plain": "were encoded as plain text",
    "allow": "became special tokens (--special allow)",
    "error": "were refused",
}


def rules(tokenizer: TokenizerSpec) -> str:
    """Return the BOS and EOS rule in words."""
    eos = "no EOS"
    if tokenizer.eos is not None:
        eos = f"EOS {tokenizer.eos_token} ({tokenizer.eos}) after each document"
    bos = "no BOS"
    if tokenizer.bos is not None:
        bos = f"BOS {tokenizer.bos_token} ({tokenizer.bos}) before each document"
    return f"{printable(eos)}, {printable(bos)}"


def plan_lines(
    request: Request, plan: Plan, sample: DocumentBatch | None, runner: str
) -> list[str]:
    """Return what a run would do, where (`runner`, in words), and its first documents."""
    inputs, tokenizer = request.source.inputs, request.tokenizer
    shuffle = request.recipe.shuffle
    each = plan.all_text_bytes // max(len(plan.tasks), 1)
    lines = [
        f"would write {printable(request.output)}",
        f"  inputs     {counted(len(inputs), 'file')}, {sum(i.bytes for i in inputs):,} bytes: "
        f"{printable(inputs[0].path)}"
        + (f" to {printable(inputs[-1].path)}" if len(inputs) > 1 else ""),
        f"  shards     {len(plan.tasks):,}, about {each:,} bytes of text each",
        f"  tokenizer  {printable(tokenizer.name)}, {counted(tokenizer.vocab_size, 'entry')}, "
        f"{tokenizer.dtype.name} on disk",
        f"  ends       {rules(tokenizer)}",
        f"  holdout    {request.recipe.holdout}" if request.recipe.holdout else "  holdout    none",
        *not_read_lines(request.source),
        *selection_lines(request.source),
        *([] if shuffle is None else [f"  shuffle    documents, seed {shuffle}"]),
        f"  runner     {printable(runner)}",
        f"  plan       {plan.digest}",
    ]
    if sample is not None:
        taken = size = 0
        for k in range(min(3, sample.documents)):
            text = sample.text(k)[:100_000]
            ids = len(tokenizer.encode(text))
            taken, size = taken + ids, size + len(text.encode())
            start = printable(text[:SAMPLE_TEXT])
            lines.append(f"  document {k}: {sample.text_bytes[k]:,} bytes, {ids:,} tokens: {start}")
        likely = plan.all_text_bytes * taken // size
        if likely and not selection_lines(request.source):
            stored = f"{likely * tokenizer.dtype.itemsize:,} bytes on disk"
            lines.append(
                f"  tokens     some {likely:,}, {stored}, if all text is as these documents"
            )
    return lines


def summary_lines(request: Request, summary: Summary, workers: int) -> list[str]:
    """Return what a run made, how fast, and what was dropped on the way."""
    manifest, totals = summary.manifest, summary.manifest.totals
    state = "already complete, nothing to do:" if summary.already_complete else "made"
    lines = [
        f"{state} {printable(summary.output)}",
        f"  train       {_size(totals.tokens, totals.documents, len(manifest.shards))} "
        f"({manifest.dtype}), digest {str(manifest.digest)[:16]}",
    ]
    if summary.validation is not None:
        held = summary.validation
        lines.append(
            f"  validation  {_size(held.totals.tokens, held.totals.documents, len(held.shards))}, "
            f"digest {str(held.digest)[:16]}, in {printable(summary.output)}/validation"
        )
        if not held.totals.documents:
            share = f"{request.recipe.holdout} of {counted(totals.documents, 'document')}"
            lines.append(
                f"    nothing is held out: {share} came to none; give a larger --holdout, "
                "or cut .txt files into shorter documents with --separator"
            )
    lines += version_lines(manifest)
    lines.append(f"  tokenizer   {printable(request.tokenizer.name)}: {rules(request.tokenizer)}")
    lines += dropped_lines(manifest.dropped, totals.documents_in)
    lines += input_lines(summary)
    lines += not_read_lines(request.source)
    lines += chosen_lines(request.source, summary)
    lines += duplicate_lines(manifest, summary.validation)
    if summary.replaced:
        count = f"{counted(summary.replaced, 'document')}"
        lines.append(f"  replaced    {count} have U+FFFD for what was not UTF-8")
    if bad_records(manifest.dropped):
        lines.append(
            f"  quarantine  "
            f"{counted(bad_records(manifest.dropped), 'record')} as they were read, in "
            f"{printable(summary.output)}/{FOLDER}"
        )
    lines += unknown_lines(request.tokenizer, summary)
    if summary.special_hits:
        lines.append(
            f"  special     {summary.special_hits:,} strings that spell a special token "
            + _SPECIAL[request.recipe.special]
        )
    if summary.proof is not None:
        lines += encoder_lines(summary)
        speed = rates(
            summary.documents_now, summary.text_bytes_now, summary.tokens_now, summary.seconds
        )
        kept = f"; {counted(summary.kept_shards, 'shard')} kept" if summary.kept_shards else ""
        lines.append(
            f"  speed       {speed} in {duration(summary.seconds)}, "
            f"{counted(workers, 'worker')}{kept}"
        )
    return lines


def encoder_lines(summary: Summary) -> list[str]:
    """Return which encoder gave the ids, what is proved of it, and what `hf` did in its stead."""
    proof = summary.proof
    assert proof is not None
    lines = [f"  encoder     {proof.encoder}: {proof.claim}"]
    if proof.reasons:
        count = summary.by_reference
        lines.append(
            f"  by hf       {count:,} document{'s' * (count != 1)}: those that {proof.reasons}"
        )
    return lines


def unknown_lines(tokenizer: TokenizerSpec, summary: Summary) -> list[str]:
    """Return how much of the text became the unknown token, in a line; [] where nothing did."""
    tokens, documents = summary.unknown
    if not tokens:
        return []
    what, why = f"{tokens:,} characters left out", "the tokenizer has no token for them"
    if tokenizer.unk_token:
        what = f"{tokens:,} unknown tokens"
        named = f"{printable(tokenizer.unk_token)} ({tokenizer.unk})"
        why = f"{named}: the tokenizer does not know the text"
    return [
        f"  unknown     {what} in {counted(documents, 'document')}: {why}; "
        "--on-unknown drop leaves such documents out"
    ]


def next_line(summary: Summary) -> str:
    """Return what to type next."""
    return f"next: olm-data verify {typed(summary.output)}"


def dropped_lines(dropped: dict[str, int], records: int) -> list[str]:
    """Return each reason for which records were dropped, with its count and meaning."""
    if not dropped:
        return [f"  dropped     nothing of {counted(records, 'record')}"]
    meaning = DROP_REASONS | SKIP_REASONS | {NO_TOKENS: "the tokenizer makes no token of the text"}
    return [
        f"  dropped     {count:,} of {counted(records, 'record')}: {reason} ({meaning[reason]})"
        for reason, count in dropped.items()
    ]


def not_read_lines(source: SourcePlan) -> list[str]:
    """Return what lies among the inputs and is not read, a line for each reason."""
    return [f"  not read    {line}" for line in passed_lines(tally(source.passed))]


def selection_lines(source: SourcePlan) -> list[str]:
    """Return what the user's selection takes, a line each; [] where it takes all."""
    options, lines = source.options, []
    if options.where is not None:
        lines.append(f"  where      {printable(options.where)}")
    if source.excluded is not None:
        lines.append(f"  exclude    {len(source.excluded):,} ids")
    if options.sample is not None:
        lines.append(f"  sample     {_percent(Fraction(options.sample))}, seed {options.seed}")
    if source.limit is not None:
        lines.append(f"  limit      {_limit(source)}")
    return lines


def chosen_lines(source: SourcePlan, summary: Summary) -> list[str]:
    """Return how far each part of the selection reached, a line each."""
    options, dropped, lines = source.options, summary.manifest.dropped, []
    if source.excluded is not None and summary.ids_found is not None:
        missing = len(source.excluded) - summary.ids_found
        lines.append(
            f"  exclude     {summary.ids_found:,} of {len(source.excluded):,} ids met"
            + (f", {missing:,} belong to no record that came so far" if missing else "")
        )
    if options.sample is not None:
        before = ("filtered", "excluded", *DROP_REASONS)
        asked = summary.manifest.totals.documents_in - sum(dropped.get(r, 0) for r in before)
        got = asked - dropped.get("unsampled", 0)
        lines.append(
            f"  sample      {_percent(Fraction(options.sample))} wanted, "
            f"{_percent(Fraction(got, max(asked, 1)))} drawn: {got:,} of "
            f"{counted(asked, 'document')} "
            f"(each text by its hash, seed {options.seed})"
        )
    if source.limit is not None:
        lines.append(f"  limit       {_limit(source)}")
    return lines


def _percent(share: Fraction) -> str:
    return f"{float(share * 100):.4g}%"


def _limit(source: SourcePlan) -> str:
    assert source.limit is not None, "asked before"
    last = source.inputs[-1]
    if last.until is None:
        return f"{counted(source.limit, 'document')}, more than there are"
    most = counted(source.limit, "document")
    return f"{most}, up to {printable(last.path)}, {last.position} {last.until}"


def version_lines(manifest: Manifest) -> list[str]:
    """Return what a dataset's name is in any order of additions, and how it grew."""
    lines = []
    copies = manifest.tools.copies
    if copies is not None and copies.content:
        lines.append(
            f"  content     {copies.content}: of the same texts in any order, files and shards"
        )
    if manifest.additions:
        newest = manifest.additions[-1]
        shards = [shard for shard in manifest.shards if manifest.plan_of(shard.name) == newest.plan]
        lines.append(
            f"  version     {len(manifest.additions) + 1}: "
            f"{counted(sum(shard.documents for shard in shards), 'document')}, "
            f"{sum(shard.tokens for shard in shards):,} tokens added to {newest.parent[:16]}, "
            "which stays readable; the digest keeps the order of additions, content does not"
        )
    return lines


def duplicate_lines(manifest: Manifest, validation: Manifest | None) -> list[str]:
    """Return how many documents are exact copies of an earlier one, in a line; [] if unknown."""
    found = manifest.tools.copies
    if found is None:
        return []
    documents = manifest.totals.documents + (validation.totals.documents if validation else 0)
    copies, size = found.duplicates, found.duplicate_bytes
    if not copies:
        return [f"  duplicates  none among {counted(documents, 'document')}"]
    return [
        f"  duplicates  {copies:,} of {counted(documents, 'document')} ({copies / documents:.1%}), "
        f"{size / 1e6:,.1f} MB of text; --dedup exact drops them"
    ]


def input_lines(summary: Summary) -> list[str]:
    """Return where the records of each input went that lost any: the first ten of them."""
    lost = [(path, account) for path, account in summary.inputs.items() if account.dropped]
    lines = []
    for path, account in lost[:INPUTS_SHOWN]:
        parts = [f"{counted(account.documents + account.held_out, 'document')}"]
        parts += [f"{count:,} {reason}" for reason, count in sorted(account.dropped.items())]
        lines.append(f"    {printable(path)}: {account.documents_in:,} = {' + '.join(parts)}")
    if len(lost) > INPUTS_SHOWN:
        lines.append(f"    and {len(lost) - INPUTS_SHOWN:,} more inputs with drops")
    return lines


def _size(tokens: int, documents: int, shards: int) -> str:
    return f"{tokens:,} tokens in {counted(documents, 'document')}, {counted(shards, 'shard')}"
