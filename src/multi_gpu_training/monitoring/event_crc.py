"""The checksum at the end of each line of events, by which the report leaves out a damaged one."""

from __future__ import annotations

import zlib

_MARK = b', "_crc": "'
_LENGTH = len(_MARK) + 8 + len(b'"}')


def with_crc(line: str) -> bytes:
    """A JSON object as a line, with the checksum of all before it as its last field."""
    body = line.encode()[:-1]
    return body + _MARK + b"%08x" % zlib.crc32(body) + b'"}'


def is_damaged(line: bytes) -> bool:
    """Whether a line differs from what was written. Version 0.1 wrote lines without a checksum."""
    body, end = line[:-_LENGTH], line[-_LENGTH:]
    if not end.startswith(_MARK):
        return not line.startswith(b'{"v": 1,')
    return end != _MARK + b"%08x" % zlib.crc32(body) + b'"}'
