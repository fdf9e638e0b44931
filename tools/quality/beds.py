"""The test beds: a dense model, and text that it is tuned and validated on."""

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Where everything is written, from the repository's root.
WORK = Path("runs/quality")
FIXTURES = Path("../shared/fixtures")


@dataclasses.dataclass(frozen=True)
class Stories:
    """stories260K, on text that a larger model of its family wrote; files that are not part of the repository."""

    name = "stories"
    text = "stories260K, on stories as it was trained on"
    dense = FIXTURES / "stories260K"
    train = WORK / "stories/train"
    valid = WORK / "stories/valid"

    def prepare(self, run):
        if not (ROOT / self.dense).is_dir():
            raise SystemExit(f"{self.dense}: a copy of stories260K is needed there; leave the bed out with --bed voyage")
        for prefix, part in ((self.train, "train"), (self.valid, "valid")):
            if not (ROOT / f"{prefix}.bin").exists():
                (ROOT / prefix).parent.mkdir(parents=True, exist_ok=True)
                text = FIXTURES / f"data/stories-{part}.jsonl"
                run("moh-data", "prepare", "--tokenizer", self.dense, "--no-append-eos", "--out", prefix, text)


@dataclasses.dataclass(frozen=True)
class Voyage:
    """The quickstart's model after it has adapted to the text of a voyage; all of it is part of the repository."""

    name = "voyage"
    text = "the quickstart's model, adapted to its text"
    dense = WORK / "voyage/dense/export"
    train = Path("recipes/quickstart/voyage")
    valid = Path("recipes/quickstart/voyage-valid")

    def prepare(self, run):
        if not (ROOT / self.dense).is_dir():
            run("moh-train", "--recipe", "tools/quality/adapt.toml")


BEDS = {bed.name: bed for bed in (Stories(), Voyage())}
