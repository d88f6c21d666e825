"""Facts of a process that Linux shows."""


def stat_of(process: int) -> list[str]:
    """Fields of a process behind its name: state, who started it, ...

    Raises:
        OSError: it is gone, or not shown.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()  # a name may hold blanks and brackets of its own
