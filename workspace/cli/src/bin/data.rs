//! `moh-data`.

fn main() {}
