//! `moh-generate`.

fn main() {}
