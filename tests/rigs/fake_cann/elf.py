"""Names that a shared library expects from others, read from its dynamic symbol table (ELF, 64 bit)."""

import mmap
import struct
from pathlib import Path

SECTION = struct.Struct("<IIQQQQIIQQ")
"""Elf64_Shdr: name, type, flags, address, offset, size, link, info, alignment, entry size."""
SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: name, info, other, section, value, size."""
DYNAMIC_SYMBOLS = 11
"""SHT_DYNSYM"""


def undefined_symbols(library: Path) -> set[str]:
    """Names with section 0: defined elsewhere. Raises ValueError for what is no such ELF file."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{library} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        sections = [SECTION.unpack_from(data, table + index * size) for index in range(count)]
        symbols = next(section for section in sections if section[1] == DYNAMIC_SYMBOLS)
        names_at = sections[symbols[6]][4]
        raw = data[symbols[4] : symbols[4] + symbols[5]]
        entries = SYMBOL.iter_unpack(raw)
        return {_text(data, names_at + entry[0]) for entry in entries if entry[3] == 0 and entry[0]}


def _text(data: mmap.mmap, start: int) -> str:
    return data[start : data.find(b"\0", start)].decode()
