//! `moh-convert`.

fn main() {}
