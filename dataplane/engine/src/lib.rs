//! In construction.
