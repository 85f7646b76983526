"""Small pieces of text that the dashboard is made of: bars, durations, counts. Pure, one line each."""


def bar(value: float, total: float, columns: int) -> str:
    """`value` of `total` as a bar of exactly `columns` columns, its ends included."""
    room = max(1, columns - 2)
    share = min(1.0, max(0.0, value / total)) if total > 0 else 0.0
    full = round(share * room)
    if 0 < share < 1:
        full = min(room - 1, max(1, full)) if room > 1 else full
    return "▕" + "█" * full + "░" * (room - full) + "▏"


def duration(seconds: float) -> str:
    """`8 s`, `3:07`, `2:03:07`, `3 d 4 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count(number: float) -> str:
    """A count in at most five characters: `812`, `12.3k`, `4.56M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            value = number / limit
            return f"{value:.2f}{unit}" if value < 10 else f"{value:.1f}{unit}" if value < 100 else f"{value:.0f}{unit}"
    return str(int(number))
