"""The rows of the fault table: what is promised when something goes wrong. `report.py` shows them.

A row has tests in files `test_NN_*.py`; one whose `missing` is not empty says why there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

LATER = "not built yet"


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        fault: what goes wrong.
        promise: what happens then.
        missing: why no test shows it, or "".
    """

    fault: str
    promise: str
    missing: str = ""


PARTS = {
    1: "Tokenise and write",
    17: "Hostile or odd input",
    29: "Files at rest",
    45: "Loader",
    52: "Trainer and checkpoints",
}

ROWS: dict[int, Row] = {
    1: Row(
        "tokenise is killed at any system call or moment",
        "the same command again ends in the bytes of a run that nobody disturbed; nothing half "
        "written is ever listed",
    ),
    2: Row(
        "a worker is killed",
        "its task is done again, at most twice; then an error names the input and the peak memory",
    ),
    3: Row("power fails", "what a manifest lists was on the disk before the manifest was"),
    4: Row(
        "the disk is full at any operation",
        "exit 5 with the room there is; what was finished stays, and a rerun goes on",
    ),
    5: Row(
        "the disk fails, takes less than it was given, or a signal cuts a call off",
        "a failure lists nothing; short writes and interrupted calls go on, no byte differs",
    ),
    6: Row("an upload breaks off", "no object is visible, and the parts sent are thrown away"),
    7: Row(
        "the store answers 500, 503, resets or times out, at any request",
        "bounded tries with growing, random waits; then exit 6 with key and request; the same "
        "bytes where it went through",
    ),
    8: Row(
        "the store is very slow or stops answering",
        "a time limit and another try; never an endless wait",
    ),
    9: Row("two writers on one output", "one of them commits, the other exits 7"),
    10: Row(
        "the store ignores conditions on a write",
        "found before work starts; only --single-writer goes on",
    ),
    11: Row(
        "the store does not know the client's checksums", "the error names the setting to change"
    ),
    12: Row(
        "unfinished uploads and temporary files are left behind",
        "gc lists them, and deletes ours only, and only old ones",
    ),
    13: Row("the output cannot be written", "refused before any text is read"),
    14: Row(
        "the clock jumps",
        "no digested byte and no order depends on the time; durations are monotonic",
    ),
    15: Row(
        "another locale, time zone, hash seed, number of workers, order of a directory",
        "the same bytes",
    ),
    16: Row("more than 2^31 or 2^32 tokens, bytes, rows", "exact, or refused when planned"),
    17: Row(
        "text that is not UTF-8, lone surrogates, byte order marks",
        "dropped into the quarantine and counted with its place, mended, or an error, as asked",
    ),
    18: Row("NUL and control characters", "kept exactly in the tokens, escaped in messages"),
    19: Row(
        "a line or document of a gigabyte",
        "memory in proportion to it; cut for the encoder only where the ids stay the same",
    ),
    20: Row(
        "a megabyte of one character; a panic of native code",
        "time in proportion to the text; a panic is an error that names the document",
    ),
    21: Row("empty documents, or white space only", "dropped and counted; never a lone EOS"),
    22: Row(
        "text that spells a special token",
        "ordinary text unless asked otherwise; no special id inside a document",
    ),
    23: Row(
        "malformed lines, missing fields, wrong types, truncated files",
        "lines are counted drops within a budget, then exit 4 with the first ten places; a damaged "
        "file is refused",
    ),
    24: Row(
        "a small file that unpacks to a huge one",
        "refused by ratio, size or window, in bounded memory, with exit 4",
    ),
    25: Row(
        "crafted Arrow or parquet files",
        "offsets and indices are checked before use; a crash of a worker names the input",
    ),
    26: Row("the same file or text twice", "a file named twice is refused; copies are counted"),
    27: Row("an input changes while it is read", "exit 4; no shard is made of two versions"),
    28: Row("escape sequences in names and ids", "no message can be forged"),
    29: Row("a file of a shard has another length", "refused when opened, by its exact size"),
    30: Row("a bit of the tokens flips", "verify finds it; so does the first read of the block"),
    31: Row("a bit flips in a header, in ends, rows or manifest", "refused, with file and field"),
    32: Row("shards are swapped, or from another dataset", "refused: digests belong to names"),
    33: Row("another type, byte order, or no header", "refused"),
    34: Row("an id outside the vocabulary", "refused when written and by verify"),
    35: Row("the tokenizer changed", "refused: digest of its file and of the ids of a probe"),
    36: Row("a fast encoder differs from the reference", "found before or during the run"),
    37: Row("a lock is edited by hand", "refused; never overwritten unasked"),
    38: Row("a manifest names paths outside its folder", "refused"),
    39: Row("hostile YAML", "refused early, small, with the line and the nearest known key"),
    40: Row(
        "a pickle in any file of a dataset, checkpoint or export, its digests made good",
        "never unpickled, by no command; the program has no other place that could do it",
    ),
    41: Row("a validation document is also in train", "cannot be: the split is by content"),
    42: Row(
        "a source left the mixture",
        "nothing of it is read: locks list digests, caches are keyed by content",
    ),
    43: Row("credentials in URLs or the environment", "in no output, file or error"),
    44: Row("weights that cannot be drawn", "refused when planned, with numbers and two fixes"),
    45: Row(
        "ranks are missing, doubled, or disagree on their number",
        "refused at start by all, with the ranks",
    ),
    46: Row(
        "ranks have different seeds, configurations or locks",
        "refused at start, on every rank, with the ranks that differ and in what",
    ),
    47: Row("resume with other sizes", "the same rows at each step"),
    48: Row("killed at any step", "the next rows are exactly the next rows"),
    49: Row("any sizes, seeds and stages", "every planned row once an epoch"),
    50: Row(
        "a cached shard vanishes, is cut short or overwritten while training",
        "fetched again, checked, counted and said; where it cannot be had, a clean stop with exit "
        "6, saved on one rank",
    ),
    51: Row(
        "storage is slow while training",
        "waiting for data is measured apart from the step's own time; a warning above a share",
    ),
    52: Row("a signal asks the run to stop", "all ranks stop at one step, saved, to be requeued"),
    53: Row("killed while saving", "there is always a good checkpoint"),
    54: Row(
        "a checkpoint is damaged",
        "never loaded; the one before it is, and it is said; --strict refuses",
    ),
    55: Row(
        "the disk is full while saving",
        "a warning; training goes on and saves again; the last good one stays",
    ),
    56: Row("a checkpoint of another version", "refused with the numbers of both, and left alone"),
    57: Row(
        "non-finite loss or gradient",
        "no rank takes the step; its documents are named; the run ends, goes on, or goes back and "
        "leaves the rows out, as asked; log and audit say so",
    ),
    58: Row("steps are skipped by hand", "recorded; the digests change, the same way always"),
    59: Row("one rank's parameters differ", "found and named, before anything is saved"),
    60: Row("a restart does not repeat the last steps", "found by replaying them"),
    61: Row("a rank hangs", "stacks and last steps are shown; all stop in bounded time"),
    62: Row("software changed between runs", "said at resume; --strict-env refuses"),
    63: Row("documents leak into each other", "other documents' logits keep their bits"),
    64: Row(
        "a stranger wrote the checkpoint, digests and all",
        "exit 3 or 4 within 50 MB: no file outside is read, no memory beyond the bytes there, no "
        "wait for a pipe",
    ),
    65: Row(
        "a run or export is copied to another place and the data is gone",
        "text, export and evaluation from it as before",
    ),
    66: Row(
        "another optimiser at a resume, or state in a checkpoint that nobody asks for",
        "refused with the names; state of any optimiser, also one made at its first step, comes "
        "back bit for bit",
    ),
    67: Row(
        "two runs on one save folder, at once or as a zombie that wakes up, local or remote",
        "one goes on; the other exits 7 on every rank and has changed no byte; a restart after a "
        "clean end or a crash here waits for nothing",
    ),
    68: Row(
        "locks of the file system do nothing",
        "one of two commands on an output goes on, the other exits 7; the bytes are right",
    ),
    69: Row(
        "a file of a dataset, lock or log is a pipe, device, folder, socket, or a link out of it",
        "refused at once, exit 3 or 4; nothing is waited for, and nothing read without a limit",
    ),
    70: Row(
        "a bomb in a dataset at rest",
        "every reading verb refuses it in less than 50 MB: page headers are read before pages",
    ),
    71: Row(
        "names and texts with escapes, bidi controls or formulas in the files of others",
        "names are refused where they are decoded; text is shown escaped, on a terminal, a page "
        "and in a picture",
    ),
    72: Row(
        "JSON that is deep, huge, with a key twice or an integer too wide",
        "refused with exit 3, whatever file it is in; nothing recurses with it",
    ),
    73: Row(
        "a store echoes credentials, or redirects",
        "no credential in any output, log, file or traceback; no redirect is followed",
    ),
    74: Row("an extra is not installed", "every command names it and what to type"),
    75: Row(
        "a fast encoder differs from the reference on some code points, or normalises otherwise",
        "documents that hold one, or would be normalised, are encoded by the reference and counted",
    ),
    76: Row(
        "text has unknown characters or spells special tokens, with any model type",
        "unknown tokens are counted, or their documents dropped if asked; no special token inside "
        "a document; what cannot be encoded is dropped by reason",
    ),
    77: Row(
        "a hostile tokenizer.json: rules that explode, patterns that backtrack",
        "tried in a child with limits of time and memory; refused",
    ),
    78: Row(
        "files among the inputs are of no format that is read, hidden, empty, pipes or links",
        "the others are read, whatever formats are mixed; each of these is named and counted in "
        "the result, the manifest and `stats`, or refused by --strict-inputs",
    ),
    79: Row(
        "an output is nowhere, the root, the home folder, or holds somebody's own files",
        "exit 2 before work; nothing is written, changed or deleted",
    ),
    80: Row(
        "standard output is full, a standard stream is closed, the working folder is gone",
        "exit 5 if results are lost, else the work is done; never a traceback",
    ),
}
