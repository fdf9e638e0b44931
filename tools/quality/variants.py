"""What is compared: ways from a dense model to one with a share of its heads."""

import dataclasses

# Heads of a layer in both test beds, and heads that read one key/value head.
HEADS, GROUP = 8, 2


@dataclasses.dataclass(frozen=True)
class Variant:
    """A conversion and what the model learns from after it."""

    name: str
    # What the table says of it.
    text: str
    router: str = "query-norm"
    # Whether shared heads are chosen by measurement.
    chosen: bool = False
    refitted: bool = False
    teacher: bool = False
    # Whether layers get different numbers of active heads, by measurement.
    # Whether tokens select no heads beside the shared ones.
    fixed: bool = False
    # Steps of training after which it is measured.
    steps: tuple[int, ...] = (300, 2000)
    # Shares of active heads that its router can have.
    shares: tuple[float, ...] = (0.75, 0.5)

    def conversion(self, share: float, calibration) -> list[str]:
        """The arguments of `moh-convert` for a share of active heads."""
        active = round(share * HEADS)
        arguments = ["--router", self.router]
        if self.fixed and self.router != "static":
            arguments += ["--shared-heads", str(active), "--routed-top-k", "0"]
        else:
            arguments += ["--active", str(share)]
        if self.chosen or self.refitted:
            arguments += calibration
            arguments += ["--shared", "calibrated" if self.chosen else "first"]
            arguments += ["--refit", "on" if self.refitted else "off"]
        return arguments


BOTH = dict(chosen=True, refitted=True)
VARIANTS = [
    Variant("dense", "dense control", shares=(1.0,)),
    Variant("paper", "first heads: the paper's way", steps=(300, 600, 1200, 2000, 4000)),
    Variant("paper-teacher", "first heads, teacher", teacher=True),
    Variant("refit", "first heads, refitted", refitted=True),
    Variant("refit-teacher", "first heads, refitted, teacher", refitted=True, teacher=True, steps=(300,)),
    Variant("chosen", "chosen heads", chosen=True),
    Variant("chosen-teacher", "chosen heads, teacher", chosen=True, teacher=True, steps=(300,)),
    Variant("measured", "chosen heads, refitted", **BOTH),
    Variant("measured-teacher", "chosen heads, refitted, teacher", **BOTH, teacher=True),
    Variant("linear", "linear router, chosen, refitted", "linear", **BOTH, steps=(300,)),
    Variant("linear-teacher", "linear router, chosen, refitted, teacher", "linear", **BOTH, teacher=True),
    Variant("two-stage", "two-stage router, first heads", "two-stage"),
    Variant("two-stage-teacher", "two-stage router, first heads, teacher", "two-stage", teacher=True),
    Variant("two-stage-measured", "two-stage router, chosen, refitted", "two-stage", **BOTH),
    Variant("two-stage-measured-teacher", "two-stage router, chosen, refitted, teacher", "two-stage", **BOTH, teacher=True),
    Variant("static", "fixed heads, chosen, refitted", "static", **BOTH, fixed=True),
    Variant("static-teacher", "fixed heads, chosen, refitted, teacher", "static", **BOTH, teacher=True, fixed=True),
    Variant("group-paper", "whole groups routed, first groups", "group"),
    Variant("group", "whole groups routed, chosen, refitted", "group", **BOTH),
    Variant("group-teacher", "whole groups routed, chosen, refitted, teacher", "group", **BOTH, teacher=True),
    Variant("fixed-groups", "fixed whole groups, chosen, refitted", "group", **BOTH, fixed=True),
    Variant("fixed-groups-teacher", "fixed whole groups, chosen, refitted, teacher", "group", **BOTH, teacher=True, fixed=True),
]
