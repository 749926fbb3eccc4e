"""JSON that a decoder must refuse early: too deep, too wide, named twice, or none."""

DEEP = {
    "lists": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open": b"[" * 300_000,
    "inside": b'{"format": "olm-plan", "version": 1, "inputs": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "wide": b'{"version": ' + b"9" * 5000 + b"}",
    "zeros": bytes(100_000),
    "twice": b'{"format": "olm-plan", "format": "olm-job"}',
}
