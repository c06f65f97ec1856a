//! Why this exists.
