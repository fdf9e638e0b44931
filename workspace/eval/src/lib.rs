//! Losses, logits and reports.
