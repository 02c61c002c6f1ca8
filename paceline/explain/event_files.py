"""
Scalars in TensorBoard event files and in the .wandb files of Weights & Biases, read without their libraries.

Both hold protocol buffers in frames with checksums: TFRecord, and LevelDB's log format. Only the fields that hold numbers over
steps are read. Damaged records are left out and reported; one that is cut at the end may still be written: it is left out.

Formats: tensorflow/core/lib/io/record_writer.cc, tensorflow/core/util/event.proto, core/framework/summary.proto and tensor.proto;
leveldb doc/log_format.md, wandb/proto/wandb_internal.proto. wandb takes CRC-32 where LevelDB takes CRC-32C.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from paceline.units import format_number_of

Report = Callable[[str], None]
Field = tuple[int, int | bytes]  # number, value
Row = tuple[dict[str, Any], float, bool]  # values by name, Unix time, whether it is a sample of the machine

MAX_EVENT_BYTES = 1 << 20  # a larger event is a picture or a sound
WANDB_HEADER, WANDB_BLOCK_BYTES = b":W&B\xe1\xbe\x00", 1 << 15
FULL, FIRST, LAST = 1, 2, 4  # kinds of a piece of a record
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
HISTORY, STATS = 2, 7  # fields of a wandb record: what the script logged, and the samples of the machine
TENSOR_FORMATS = {1: "<f", 2: "<d"}  # by dtype; the values of dtype N are in field 4 + N, or packed in field 4


class Scalar(NamedTuple):
    """One point of a curve. time: Unix seconds, NaN if unknown."""

    name: str
    step: int
    value: float
    time: float


def make_crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


CRC_TABLE = make_crc_table()


def masked_crc(data: bytes) -> bytes:
    """The CRC-32C of a TFRecord frame, masked, as its four bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def read_fields(message: bytes) -> Iterator[Field]:
    """Yields the fields of a protocol buffer: a varint as int, any other as bytes. Raises ValueError if it is cut."""
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = read_varint(message, at)
            yield number, value
            continue
        size = FIXED_BYTES.get(wire)
        if wire == BYTES:
            size, at = read_varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("not a protocol buffer")
        yield number, message[at : at + size]
        at += size


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and where it ends."""
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("a cut number")


def read_event_file(file: BinaryIO, report: Report) -> Iterator[Scalar]:
    """Yields the scalars of a TensorBoard event file, and leaves it where the next record begins."""
    num_damaged = 0
    while header := file.read(12):
        length = int.from_bytes(header[:8], "little")
        if len(header) < 12 or masked_crc(header[:8]) != header[8:]:
            at = file.seek(-len(header), os.SEEK_CUR)
            if len(header) == 12 or not at:  # else its writer may still write it
                report(f"damaged at byte {at:,}: what follows was left out" if at else "not an event file")
            break
        record, crc = file.read(length), file.read(4)
        if len(crc) < 4:  # its writer may still write it
            file.seek(-len(header + record + crc), os.SEEK_CUR)
            break
        scalars: list[Scalar] | None = []
        try:
            if length <= MAX_EVENT_BYTES:
                scalars = event_scalars(record) if masked_crc(record) == crc else None
        except (ValueError, TypeError):
            scalars = None
        if scalars is None:
            num_damaged += 1
        yield from scalars or ()
    if num_damaged:
        report(f"left out {format_number_of(num_damaged, 'damaged record')}")


def event_scalars(event: bytes) -> list[Scalar]:
    """The scalars of an Event: wall_time 1, step 2, summary 5, with value 1: tag 1, simple_value 2, tensor 8."""
    step, time, scalars = 0, math.nan, list[Scalar]()
    for number, field in read_fields(event):
        if number == 1:
            time = unpack("<d", field)
        elif number == 2:
            step = signed(field)
        elif number == 5:
            for _, value in read_fields(as_bytes(field)):
                parts = dict(read_fields(as_bytes(value)))
                scalar = unpack("<f", parts[2]) if 2 in parts else read_tensor(as_bytes(parts.get(8, b"")))
                if scalar is not None:
                    tag = as_bytes(parts.get(1, b"")).decode("utf-8", "replace")
                    scalars.append(Scalar(tag, step, scalar, time))
    return [scalar._replace(step=step, time=time) for scalar in scalars]


def read_tensor(tensor: bytes) -> float | None:
    """The value of a TensorProto with one float; None for any other."""
    parts = dict(read_fields(tensor))
    dtype = parts.get(1)
    if not isinstance(dtype, int) or dtype not in TENSOR_FORMATS:
        return None
    value = parts.get(4) or parts.get(4 + dtype) or b""
    one = isinstance(value, bytes) and len(value) == struct.calcsize(TENSOR_FORMATS[dtype])
    return unpack(TENSOR_FORMATS[dtype], value) if one else None


def read_wandb_file(file: BinaryIO, report: Report) -> Iterator[Row]:
    """Yields the rows of a .wandb file, or from one of its blocks on: what the script logged, and the samples of the machine."""
    if not file.tell() and file.read(len(WANDB_HEADER)) != WANDB_HEADER:
        report("not a file of W&B, or of an unknown version")
        return
    record: bytes | None = None
    num_damaged = 0
    for kind, piece in wandb_pieces(file, report):
        if kind in (FULL, FIRST):
            record = piece
        elif record is not None:  # else it began before what is read
            record += piece
        if record is not None and kind in (FULL, LAST):
            try:
                rows = list(wandb_rows(record))
            except (ValueError, TypeError):
                num_damaged, rows = num_damaged + 1, []
            yield from rows
            record = None
    if num_damaged:
        report(f"left out {format_number_of(num_damaged, 'damaged record')}")


def wandb_pieces(file: BinaryIO, report: Report) -> Iterator[tuple[int, bytes]]:
    """Yields kind and content of each piece: checksum (4 bytes), length (2), kind (1), content. No piece crosses a block."""
    while block := file.read(size := WANDB_BLOCK_BYTES - file.tell() % WANDB_BLOCK_BYTES):
        at = 0
        while at + 7 <= len(block):
            crc, length, kind = struct.unpack_from("<IHB", block, at)
            piece = block[at + 7 : at + 7 + length]
            if kind == 0 and length == 0:
                break  # the writer left the end of the block empty
            if len(piece) < length and len(block) < size:
                break  # its writer may still write it
            if len(piece) < length or zlib.crc32(block[at + 6 : at + 7 + length]) != crc:
                where = file.tell() - len(block) + at
                report(f"damaged at byte {where:,}: the rest of its block of 32 KiB was left out")
                break
            yield kind, piece
            at += 7 + length


def wandb_rows(record: bytes) -> Iterator[Row]:
    """Yields the row of a history record (item 1) or a stats record (item 3, timestamp 2)."""
    for number, message in read_fields(record):
        if number not in (HISTORY, STATS):
            continue
        row: dict[str, Any] = {}
        time = math.nan
        for part, item in read_fields(as_bytes(message)):
            if part == (1 if number == HISTORY else 3):
                fields = list(read_fields(as_bytes(item)))
                key = ".".join(as_bytes(value).decode("utf-8", "replace") for field, value in fields if field in (1, 2))
                row[key] = json.loads(next((as_bytes(value) for field, value in fields if field == 16), b"null"))
            elif part == 2 and number == STATS:
                seconds = dict(read_fields(as_bytes(item))).get(1)
                time = float(seconds) if isinstance(seconds, int) else math.nan
        logged_at = row.get("_timestamp")
        yield row, float(logged_at) if isinstance(logged_at, int | float) else time, number == STATS


def as_bytes(field: int | bytes) -> bytes:
    if isinstance(field, int):
        raise ValueError("a number in place of bytes")
    return field


def unpack(form: str, field: int | bytes) -> float:
    try:
        return float(struct.unpack(form, as_bytes(field))[0])
    except struct.error as error:
        raise ValueError("a number of another size") from error


def signed(field: int | bytes) -> int:
    if not isinstance(field, int):
        raise ValueError("bytes in place of a number")
    return field - (1 << 64) if field >> 63 else field
