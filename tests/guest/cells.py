"""Contents that name their place: each cell of 8 bytes has the number of the file, a version and the number of the cell. The guest and
the host use this."""

import array

CELL = 8
# Without the version.
PLACE = (0xFFFF0000FFFFFFFF).to_bytes(CELL, "little")


def cells(file, at, count, version=0):
    """The cells from the byte `at` on, which is a multiple of 8."""
    first = file << 48 | (version & 0xFFFF) << 32 | at // CELL
    return array.array("Q", range(first, first + count)).tobytes()


def foreign(data, file, at, holes=False):
    """Says which byte of the data, which was read at `at`, belongs elsewhere, or None. holes: zeroes may be there too."""
    start, end = at & -CELL, (at + len(data) + CELL - 1) & -CELL
    count = (end - start) // CELL
    due = cells(file, start, count)[at - start :][: len(data)]
    mask = (PLACE * count)[at - start :][: len(data)]
    got, wanted, care = (int.from_bytes(octets, "little") for octets in (data, due, mask))
    if not (got ^ wanted) & care:
        return None
    for place, (got, wanted, care) in enumerate(zip(data, due, mask)):
        if (got ^ wanted) & care and not (holes and got == 0):
            cell = max((at + place & -CELL) - at, 0)
            shown = [bytes(octets[cell : cell + 32]).hex(" ", CELL) for octets in (data, due)]
            return f"file {file}, byte {at + place:#x}: {shown[0]}, expected {shown[1]}"
    return None
