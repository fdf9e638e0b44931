//! RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight.
//!
//! With r = inv_rms and h = d_y * weight, the gradients are
//! d_x = r h - x r^3 mean(h x) and d_weight = sum over tokens of d_y x r.

pub(crate) mod cpu;
