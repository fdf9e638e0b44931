"""Rows of the comparison: measured on both sides, with the target ratio."""

from dataclasses import asdict, dataclass, field


@dataclass
class Row:
    what: str
    ours: float | None
    theirs: float | None
    unit: str
    at_least: float | None = None  # ours / theirs, target
    at_most: float | None = None
    note: str = ""
    samples: dict = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.ours and self.theirs else None

    @property
    def met(self) -> bool | None:
        if self.ratio is None or (self.at_least is None and self.at_most is None):
            return None
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.ratio <= self.at_most

    def json(self) -> dict:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}

    def cells(self) -> list[str]:
        def number(value):
            if value is None:
                return "-"
            return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"

        wanted = "-"
        if self.at_least is not None:
            wanted = f">= {self.at_least:g}"
        elif self.at_most is not None:
            wanted = f"<= {self.at_most:g}"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        met = {True: "yes", False: "no", None: "-"}[self.met]
        return [
            self.what, number(self.ours), number(self.theirs), self.unit, ratio, wanted, met,
            self.note,
        ]


HEADER = ["what", "ours", "theirs", "unit", "ratio", "wanted", "met", ""]


def table(rows: list[Row]) -> str:
    lines = [HEADER] + [row.cells() for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    left = {0, 3, 7}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
