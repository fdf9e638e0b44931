//! Token files: preparation, reading and a deterministic order.
