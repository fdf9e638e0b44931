//! `moh-train`.

fn main() {}
