"""The option `cpu_bind`: the processor cores of ranks."""

from __future__ import annotations

from quire.errors import ConfigError, shown

AUTO, NONE = "auto", "none"
MAX_CPU = 1 << 16


def check_cpu_bind(value: object, num_ranks: int) -> None:
    """Check the option's value."""
    allowed = '"auto", "none", or a list of cores for each rank of a host, such as "0-3|4-7"'
    if not isinstance(value, str):
        raise ConfigError(f"cpu_bind must be {allowed}, got {shown(value)}", field="cpu_bind")
    try:
        lists = cpu_lists(value)
    except ValueError as error:
        raise ConfigError(f"cpu_bind must be {allowed}, got {shown(value)}: {error}", field="cpu_bind") from error
    if lists is None:
        return
    if num_ranks == 1:
        raise ConfigError(
            f"cpu_bind is for ranks: for a model in one process it must be {AUTO!r} or {NONE!r}, got {shown(value)}; "
            "taskset binds one process",
            field="cpu_bind",
        )
    if len(lists) > num_ranks:
        raise ConfigError(
            f"cpu_bind has {len(lists)} lists of cores, more than there are ranks ({num_ranks}): {shown(value)}",
            field="cpu_bind",
        )
    cpus = [cpu for cpu_list in lists for cpu in cpu_list]
    twice = next((cpu for idx, cpu in enumerate(cpus) if cpu in cpus[:idx]), None)
    if twice is not None:
        raise ConfigError(
            f"cpu_bind must have each core in one list, got {twice} in two: {shown(value)}", field="cpu_bind"
        )


def cpu_lists(value: str) -> list[tuple[int, ...]] | None:
    """Return the cores of each rank of a host; None if the value has no lists.

    Raises:
        ValueError: the value is malformed.
    """
    return None if value in (AUTO, NONE) else [read_cpu_list(part) for part in value.split("|")]


def read_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as "0-3,8", each once and in the given order.

    Raises:
        ValueError: the text is malformed or empty.
    """
    cpus: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"{part!r} is no number, and no range of numbers")
        numbers = range(int(first), int(last if dash else first) + 1)
        if not numbers or numbers[-1] >= MAX_CPU:
            raise ValueError(f"{part!r} is no range of cores")
        cpus |= dict.fromkeys(numbers)
    return tuple(cpus)
