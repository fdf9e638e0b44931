"""Standard output and standard error that are closed, full or broken."""

import subprocess

from workplace import Workplace, remove

STREAMS = {
    "closed": ">&- 2>&-",
    "full": ">/dev/full 2>/dev/full",
    "broken": "2>&1 | head -n 1 >/dev/null",
}


def broken(workplace: Workplace) -> dict:
    """Runs with outputs that cannot be written: they must train to the end."""
    for name, redirection in STREAMS.items():
        run = workplace.folder / f"streams-{name}"
        command = " ".join(f"'{part}'" for part in workplace.command(run))
        subprocess.run(["sh", "-c", f"{command} {redirection}"], check=False)
        if differs := workplace.differs(run):
            raise SystemExit(f"streams {name}: other {differs}")
        remove(run)
    return {"runs": len(STREAMS), "lost": 0}
