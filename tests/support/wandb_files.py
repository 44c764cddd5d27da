"""What Weights & Biases writes offline."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

_LOG_BLOCK_BYTES = 32768


def read_records(path: Path) -> list[Any]:
    """Parse W&B's file: 7 bytes, then LevelDB's log format (32 KiB blocks of chunks with a 7-byte header)."""
    # The module picks one of several generated ones when it is imported; a type checker sees none.
    record_class = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, records, parts, position = path.read_bytes(), [], b"", 7
    while position + 7 <= len(data):
        if _LOG_BLOCK_BYTES - position % _LOG_BLOCK_BYTES < 7:
            position += _LOG_BLOCK_BYTES - position % _LOG_BLOCK_BYTES
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = record_class()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records
