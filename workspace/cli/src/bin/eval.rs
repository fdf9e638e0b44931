//! `moh-eval`.

fn main() {}
